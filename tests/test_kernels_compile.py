"""Every named kernel compiles without a GPU, for the right instructions and without spills.

Only headers from PyPI are searched, so that no CUDA toolkit of the machine hides a missing one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="compiling needs the jit extra")

from tileflow import jit
from tileflow.backends.cuda import params, variants
from tileflow.config import Config
from tileflow.errors import CompileError, ConfigError

HOPPER_SHARED_BYTES = 227 * 1024
SMALLEST_SHARED_BYTES = 99 * 1024  # of a CTA on 8.6, 8.9 and 12.0


def label(variant: jit.KernelVariant) -> str:
    constants = dict(variant.constants)
    tile = f"{constants['kTileM']}x{constants['kTileN']}" if "kTileM" in constants else ""
    return "-".join(filter(None, (variant.entry, tile, variant.dtype, variant.arch)))


def compile_with_packages(variant: jit.KernelVariant) -> Path:
    return jit.compile_variant(variant, headers=jit.header_dirs(system=False))


def path_or_error(variant: jit.KernelVariant) -> Path | str:
    try:
        return compile_with_packages(variant)
    except CompileError as error:
        return str(error)


@pytest.fixture(scope="module")
def cubin() -> Iterator[Callable[[jit.KernelVariant], Path]]:
    """A function variant -> path; all named variants are compiled in two processes."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs: dict[jit.KernelVariant, Future[Path | str]] = {
            variant: pool.submit(path_or_error, variant) for variant in variants.NAMED
        }

        def finished(variant: jit.KernelVariant) -> Path:
            result = jobs[variant].result()
            return result if isinstance(result, Path) else pytest.fail(result)

        yield finished


def tool(name: str) -> str:
    folders = [Path(p) / "cu13/bin" for p in find_spec("nvidia").submodule_search_locations]
    path = ":".join(map(str, [*folders, "/usr/local/cuda/bin"]))
    found = shutil.which(name, path=path) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (pip install nvidia-cuda-{name})")
    return found


def run_tool(name: str, *arguments: str) -> str:
    return subprocess.run(
        [tool(name), *arguments], capture_output=True, text=True, check=True
    ).stdout


def opcodes(cubin: Path) -> list[str]:
    """Return the mnemonics of a cubin's machine code, in order."""
    listing = run_tool("nvdisasm", "-c", str(cubin))
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing)


def usage(cubin: Path, entry: str) -> dict[str, int]:
    """Return what ptxas says about a kernel: REG, STACK, SHARED, LOCAL ..."""
    report = run_tool("cuobjdump", "-res-usage", str(cubin))
    line = re.search(rf"Function {entry}:\s*(.*)", report)
    assert line, report
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line[1])}


named = pytest.mark.parametrize("variant", variants.NAMED, ids=label)
generic_producers = [v for v in variants.NAMED if v.entry == variants.GENERIC]
sm90_producers = [v for v in variants.NAMED if v.entry == variants.SM90]


@named
def test_a_named_variant_compiles_with_headers_from_pypi_alone(cubin, variant):
    assert cubin(variant).read_bytes()[:4] == b"\x7fELF"


@named
def test_no_register_is_spilled(cubin, variant):
    found = usage(cubin(variant), variant.entry)
    assert (found["STACK"], found["LOCAL"]) == (0, 0), found
    assert not {"LDL", "STL"} & {op.split(".")[0] for op in opcodes(cubin(variant))}


@named
def test_a_cta_fits_the_register_file(cubin, variant):
    registers = -(-usage(cubin(variant), variant.entry)["REG"] // 8) * 8
    assert registers * variant.threads <= 65536


@pytest.mark.parametrize("variant", sm90_producers, ids=label)
def test_the_hopper_producer_uses_wgmma_tma_and_register_reallocation(cubin, variant):
    code = opcodes(cubin(variant))
    assert len(code) > 300, "a stub"
    found = {op.split(".")[0] for op in code}
    assert {"HGMMA", "UTMALDG", "UTMASTG"} <= found
    assert "HMMA" not in found
    if dict(variant.constants)["kTileM"] == 128:
        assert "USETMAXREG" in found


@pytest.mark.parametrize("variant", generic_producers, ids=label)
def test_the_generic_producer_uses_tensor_cores_ldmatrix_and_cp_async(cubin, variant):
    code = opcodes(cubin(variant))
    assert len(code) > 300, "a stub"
    names = [op.split(".")[0] for op in code]
    constants = dict(variant.constants)
    per_stage = constants["kTileM"] * constants["kTileN"] * constants["kTileK"]
    assert names.count("HMMA") >= per_stage // (16 * 8 * 16) // 8  # of one of eight warps
    assert {"LDSM", "LDGSTS"} <= set(names)


@pytest.mark.parametrize("variant", [*generic_producers, *sm90_producers], ids=label)
def test_a_producer_stores_rows_as_16_byte_vectors(cubin, variant):
    stores = [op for op in opcodes(cubin(variant)) if op.startswith("STG")]
    assert stores and all(".128" in op for op in stores)


def test_every_configuration_has_a_producer_on_every_gpu():
    for cc in ("80", "86", "89", "90", "100", "120"):
        for tile_m in (64, 128):
            for tile_n in (128, 256):
                Config(tile_m=tile_m, tile_n=tile_n)
                assert variants.producer(cc, "bfloat16", tile_m, tile_n) in variants.ALL


def test_shared_memory_stays_within_what_each_gpu_gives_a_cta():
    for variant in variants.ALL:
        hopper = variant.entry == variants.SM90
        limit = HOPPER_SHARED_BYTES if hopper else SMALLEST_SHARED_BYTES
        assert variant.shared_bytes + 1024 <= limit, label(variant)


def test_named_is_a_part_of_all_and_short_enough_for_every_push():
    assert set(variants.NAMED) <= set(variants.ALL)
    assert len(set(variants.NAMED)) == len(variants.NAMED) <= 30


def test_hopper_takes_its_own_producer_and_others_the_generic_one():
    assert variants.producer("90", "float16", 128, 256).arch == "sm_90a"
    assert variants.producer("100", "float16", 128, 256).arch == "sm_100"
    forced = variants.producer("90", "float16", 128, 256, family=variants.GENERIC)
    assert (forced.entry, forced.arch) == (variants.GENERIC, "sm_90")


def test_arrivals_per_tile_are_one_per_storing_party():
    assert variants.arrivals_per_tile(variants.producer("90", "float16", 128, 256)) == 2
    assert variants.arrivals_per_tile(variants.producer("90", "float16", 64, 256)) == 1
    assert variants.arrivals_per_tile(variants.producer("80", "float16", 128, 256)) == 1


@pytest.mark.parametrize("cc", ["75", "", "9.0"])
def test_an_unsupported_gpu_is_refused_by_name(cc):
    with pytest.raises(ConfigError, match="compute capability"):
        variants.consumer(cc)


def test_the_hopper_producer_is_refused_elsewhere():
    with pytest.raises(ConfigError, match="90"):
        variants.producer("100", "float16", 128, 256, family=variants.SM90)


def generic_with(structs: dict[str, np.dtype]) -> jit.KernelVariant:
    variant = variants.producer("80", "float16", 64, 128)
    return replace(variant, declarations=variants.declarations(structs))


def other_type(dtype: np.dtype, name: str, to: type) -> np.dtype:
    fields = [(n, to if n == name else dtype.fields[n][0]) for n in dtype.names]
    return np.dtype(fields, align=True)


ALL_STRUCTS = {**variants.RECORDS, **params.STRUCTS}


@pytest.mark.parametrize(
    ("struct", "field"), [("ProducerParams", "n"), ("Band", "row"), ("ScheduleEntry", "band")]
)
def test_a_layout_that_differs_from_numpys_does_not_compile(struct, field):
    wrong = {struct: other_type(ALL_STRUCTS[struct], field, np.int64)}
    with pytest.raises(CompileError, match=rf"size of {struct}"):
        compile_with_packages(generic_with({**ALL_STRUCTS, **wrong}))


def test_two_fields_that_changed_places_do_not_compile():
    fields = params.PRODUCER.fields
    offsets = {name: fields[name][1] for name in fields}
    offsets["n"], offsets["k"] = offsets["k"], offsets["n"]
    swapped = np.dtype(
        {
            "names": list(fields),
            "formats": [fields[name][0] for name in fields],
            "offsets": list(offsets.values()),
            "itemsize": params.PRODUCER.itemsize,
        }
    )
    with pytest.raises(CompileError, match=r"ProducerParams\.[nk]"):
        compile_with_packages(generic_with({**ALL_STRUCTS, "ProducerParams": swapped}))


@pytest.fixture
def edited_sources(tmp_path, monkeypatch) -> Callable[[str, str, str], None]:
    """A function (file, old, new) that edits a copy of the sources, which then is in force."""
    sources = tmp_path / "cuda_src"
    shutil.copytree(jit.source_dir(), sources)
    monkeypatch.setenv("TILEFLOW_CUDA_SRC", str(sources))

    def edit(file: str, old: str, new: str) -> None:
        text = (sources / file).read_text()
        assert old in text
        (sources / file).write_text(text.replace(old, new, 1))

    return edit


def test_a_mistake_in_a_copied_kernel_is_reported_at_its_own_line(edited_sources):
    first_line = "extern __shared__ __align__(128) unsigned char ring[];"
    edited_sources("producer_generic.cu", first_line, first_line + " nonsense;")
    text = (jit.source_dir() / "producer_generic.cu").read_text()
    line = text[: text.index("nonsense")].count("\n") + 1
    with pytest.raises(CompileError, match=rf"producer_generic\.cu\({line}\)"):
        compile_with_packages(variants.producer("80", "float16", 64, 128))


def test_a_shared_memory_size_that_the_kernel_does_not_expect_does_not_compile():
    variant = variants.producer("80", "float16", 64, 128)
    constants = tuple(sorted({**dict(variant.constants), "kStages": 5}.items()))
    with pytest.raises(CompileError, match="the launch gives what the ring needs"):
        compile_with_packages(replace(variant, constants=constants))
