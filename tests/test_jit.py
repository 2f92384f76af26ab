"""Finding sources and headers, the cubin cache, and what users see when a kernel is wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.core", reason="compiling needs the jit extra")

from tileflow import jit
from tileflow.config import Environment
from tileflow.errors import CompileError, ConfigError

KERNEL = """
#include "value.cuh"
extern "C" __global__ void kernel(int* out) { *out = kAnswer + header_value(); }
"""
COMPILE = """
import pathlib, sys
from tileflow import config, jit
source, cache = map(pathlib.Path, sys.argv[1:])
variant = jit.KernelVariant("kernel.cu", "kernel", (("kAnswer", 42),), None, "sm_80", 32)
env = config.Environment(cuda_src=source, cache=cache)
print(jit.compile_variant(variant, environment=env, headers=()))
"""
VARIANT = jit.KernelVariant("kernel.cu", "kernel", (("kAnswer", 42),), None, "sm_80", 32)


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    """An environment with one tiny kernel and an empty cache."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "kernel.cu").write_text(KERNEL)
    (sources / "value.cuh").write_text("__device__ inline int header_value() { return 1; }\n")
    return Environment(cuda_src=sources, cache=tmp_path / "cache")


@pytest.fixture
def no_earlier_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_WARNED", set())
    monkeypatch.setattr(jit, "_IN_MEMORY", {})


def compiled(env: Environment, variant: jit.KernelVariant = VARIANT) -> Path:
    return jit.compile_variant(variant, environment=env, headers=())


def is_elf(path: Path) -> bool:
    return path.read_bytes()[:4] == b"\x7fELF"


def cubins(env: Environment) -> list[Path]:
    return sorted((env.cache / "kernels").iterdir())


class TestFolders:
    def test_the_override_names_the_source_folder(self, env, monkeypatch):
        monkeypatch.setenv("TILEFLOW_CUDA_SRC", str(env.cuda_src))
        assert jit.source_dir() == env.cuda_src

    def test_an_override_that_is_no_folder_is_refused_by_name(self, tmp_path):
        with pytest.raises(ConfigError, match="TILEFLOW_CUDA_SRC"):
            jit.source_dir(Environment(cuda_src=tmp_path / "missing"))

    def test_without_an_override_the_sources_are_those_of_the_package_or_checkout(self):
        assert (jit.source_dir(Environment()) / "producer_generic.cu").is_file()

    def test_header_folders_come_in_the_documented_order(self, tmp_path):
        folders = {name: tmp_path / name for name in ("first", "cutlass/include", "home/include")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        env = Environment(
            cuda_include=(tmp_path / "first",),
            cutlass_path=tmp_path / "cutlass",
            cuda_home=tmp_path / "home",
        )
        found = jit.header_dirs(env)
        packages = [p for p in jit.header_dirs(Environment(), system=False) if p in found]
        assert list(found[:2]) == [folders["first"], folders["cutlass/include"]]
        assert list(found[2 : 2 + len(packages)]) == packages
        assert found[2 + len(packages)] == folders["home/include"]

    def test_system_folders_can_be_left_out(self, tmp_path):
        (tmp_path / "include").mkdir()
        found = jit.header_dirs(Environment(cuda_home=tmp_path), system=False)
        assert not any(str(p).startswith((str(tmp_path), "/usr/local")) for p in found)

    def test_folders_that_do_not_exist_are_left_out(self, tmp_path):
        env = Environment(cuda_include=(tmp_path / "missing",))
        assert all(folder.is_dir() for folder in jit.header_dirs(env))


class TestPrologue:
    def test_it_defines_the_dtype_and_the_constants(self):
        text = jit.prologue(replace(VARIANT, dtype="bfloat16"))
        assert "#define TILEFLOW_DTYPE_BF16 1" in text
        assert "constexpr int kAnswer = 42;" in text
        assert "constexpr int kAbortWord = 0;" in text
        assert "constexpr int kWaitReturn = 3;" in text

    def test_it_ends_by_naming_the_users_file(self):
        assert jit.prologue(VARIANT).endswith('#line 1 "kernel.cu"\n')


class TestCache:
    def test_the_second_call_finds_the_first_ones_cubin(self, env, monkeypatch):
        first = compiled(env)
        monkeypatch.setattr(jit, "_compile", lambda *_: pytest.fail("compiled again"))
        assert compiled(env) == first and is_elf(first)

    def test_an_edited_source_gives_new_code(self, env):
        first = compiled(env)
        source = env.cuda_src / "kernel.cu"
        source.write_text(source.read_text().replace("+", "-"))
        second = compiled(env)
        assert first.read_bytes() != second.read_bytes()

    def test_an_edited_header_gives_new_code(self, env):
        first = compiled(env)
        header = env.cuda_src / "value.cuh"
        header.write_text(header.read_text().replace("return 1", "return 1000"))
        assert first.read_bytes() != compiled(env).read_bytes()

    def test_constants_and_architecture_are_part_of_the_key(self, env):
        variants = [VARIANT, replace(VARIANT, constants=(("kAnswer", 7),))]
        variants.append(replace(VARIANT, arch="sm_90"))
        assert len({compiled(env, variant) for variant in variants}) == 3

    def test_another_source_folder_gives_its_own_code(self, env, tmp_path):
        first = compiled(env)
        other = tmp_path / "other"
        other.mkdir()
        (other / "kernel.cu").write_text('extern "C" __global__ void kernel(int*) {}\n')
        assert compiled(replace(env, cuda_src=other)).read_bytes() != first.read_bytes()

    def test_a_broken_cache_file_is_compiled_again(self, env):
        path = compiled(env)
        path.write_bytes(b"")
        assert is_elf(compiled(env))

    def test_processes_that_compile_at_once_leave_one_whole_file(self, env):
        command = [sys.executable, "-c", COMPILE, str(env.cuda_src), str(env.cache)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ranks = [
            subprocess.Popen(
                command, env=environ, cwd=env.cuda_src, stdout=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        said = {rank.communicate(timeout=120)[0].strip() for rank in ranks}
        assert [rank.returncode for rank in ranks] == [0] * 4
        assert said == {str(path) for path in cubins(env)} and len(said) == 1
        assert is_elf(cubins(env)[0])


@pytest.mark.usefixtures("no_earlier_warning")
class TestUnusableCache:
    def test_a_cache_that_cannot_be_made_warns_once_and_compiles_into_memory(self, env, tmp_path):
        (tmp_path / "file").write_text("")
        blocked = replace(env, cache=tmp_path / "file")
        with pytest.warns(RuntimeWarning, match=str(tmp_path / "file")) as caught:
            paths = {compiled(blocked), compiled(blocked)}
            other = compiled(blocked, replace(VARIANT, arch="sm_90"))
        assert len(caught) == 1 and len(paths) == 1
        assert all(is_elf(path) for path in (*paths, other))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
    def test_a_read_only_cache_warns_and_works(self, env):
        (env.cache / "kernels").mkdir(parents=True, mode=0o500)
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            assert is_elf(compiled(env))

    def test_a_full_disk_leaves_no_partial_file(self, env, monkeypatch):
        def full(_handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.warns(RuntimeWarning, match="No space left"):
            assert is_elf(compiled(env))
        assert cubins(env) == []

    def test_other_processes_can_read_a_cubin_in_memory(self, env, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.warns(RuntimeWarning):
            path = compiled(replace(env, cache=tmp_path / "file"))
        head = subprocess.run(["head", "-c", "4", str(path)], capture_output=True, check=True)
        assert head.stdout == b"\x7fELF"


class TestErrors:
    def test_an_error_names_file_line_and_command(self, env):
        (env.cuda_src / "kernel.cu").write_text("// fine\nint broken = nothing;\n")
        with pytest.raises(CompileError) as caught:
            compiled(env)
        assert "kernel.cu(2)" in caught.value.log and "nothing" in caught.value.log
        assert "sm_80" in caught.value.command and str(env.cuda_src) in caught.value.command
        assert caught.value.source == "kernel.cu"

    def test_a_missing_source_is_a_compile_error_that_names_the_folder(self, env):
        with pytest.raises(CompileError, match=str(env.cuda_src)):
            compiled(env, replace(VARIANT, source="nothing.cu"))

    def test_a_missing_compiler_is_named_with_the_extra_that_brings_it(self, env, monkeypatch):
        monkeypatch.setattr(jit, "_compiler", jit._compiler.__wrapped__)  # forgets what it found
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        with pytest.raises(CompileError, match=r"tileflow\[jit\]"):
            compiled(env)

    def test_a_failed_compilation_is_not_cached(self, env):
        source = env.cuda_src / "kernel.cu"
        source.write_text("broken")
        with pytest.raises(CompileError):
            compiled(env)
        source.write_text(KERNEL)
        assert is_elf(compiled(env))


class FakeCupy(SimpleNamespace):
    """The three things of CuPy that a load touches; counts the modules it was given."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.device = 0
        driver = SimpleNamespace(CUDADriverError=RuntimeError)
        device = lambda: SimpleNamespace(id=self.device)  # noqa: E731
        super().__init__(cuda=SimpleNamespace(Device=device, driver=driver))

    def RawModule(self, path: str) -> SimpleNamespace:
        self.modules.append(path)
        return SimpleNamespace(get_function=lambda name: SimpleNamespace(name=name))


class TestLoad:
    @pytest.fixture
    def cupy(self, env, monkeypatch):
        fake = FakeCupy()
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setattr(jit, "_LOADED", {})
        monkeypatch.setattr(jit, "_LOOK_INTERVAL_S", 1e-9)  # tests edit faster than people
        monkeypatch.setenv("TILEFLOW_CUDA_SRC", str(env.cuda_src))
        monkeypatch.setenv("TILEFLOW_CACHE", str(env.cache))
        return fake

    def test_a_kernel_is_loaded_once_per_device(self, cupy):
        kernels = [jit.load(VARIANT), jit.load(VARIANT)]
        cupy.device = 1
        kernels.append(jit.load(VARIANT))
        assert kernels[0] is kernels[1] is not kernels[2]
        assert len(cupy.modules) == 2

    def test_the_kernel_may_use_its_shared_memory(self, cupy):
        kernel = jit.load(replace(VARIANT, shared_bytes=98304))
        assert kernel.name == "kernel" and kernel.max_dynamic_shared_size_bytes == 98304

    def test_an_edit_is_taken_at_the_next_load(self, cupy, env):
        first = jit.load(VARIANT)
        source = env.cuda_src / "kernel.cu"
        source.write_text(source.read_text().replace("+", "- 2 *"))
        assert jit.load(VARIANT) is not first
        assert len(set(cupy.modules)) == 2

    def test_a_cubin_that_the_driver_refuses_is_a_compile_error(self, cupy, monkeypatch):
        def refuse(path: str) -> None:
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

        monkeypatch.setattr(cupy, "RawModule", refuse)
        with pytest.raises(CompileError, match="NO_BINARY_FOR_GPU"):
            jit.load(VARIANT)
