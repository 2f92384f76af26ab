"""Configuration is checked when made; the environment is read in one place."""

import re
from pathlib import Path

import pytest

from tileflow.config import Config, Environment, MoEShape
from tileflow.errors import ConfigError

SIZES = {"hidden": 64, "ffn": 32, "num_experts": 8, "top_k": 2, "max_tokens": 16}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", 12),
        ("hidden", 0),
        ("ffn", 7),
        ("hidden_out", 9),
        ("num_experts", 0),
        ("top_k", 17),
        ("top_k", True),
        ("max_tokens", -1),
        ("dtype", "float32"),
        ("activation", "tanh"),
    ],
)
def test_a_shape_names_the_field_the_value_and_what_is_allowed(field, value):
    with pytest.raises(ConfigError) as caught:
        MoEShape(**{**SIZES, field: value})
    assert caught.value.field == f"MoEShape.{field}" and caught.value.value == value
    assert caught.value.allowed in str(caught.value)


@pytest.mark.parametrize("field", ["hidden", "ffn", "hidden_out"])
def test_a_width_that_is_no_multiple_of_eight_says_so(field):
    with pytest.raises(ConfigError, match="multiple of 8"):
        MoEShape(**{**SIZES, field: 100})


@pytest.mark.parametrize("width", [512, 768, 2048, 2880, 3072, 5120, 7168])
def test_common_widths_are_accepted(width):
    assert MoEShape(**{**SIZES, "hidden": width}).hidden_out == width


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layout", "loose"),
        ("put_path", "pigeon"),
        ("tile_m", 96),
        ("tile_n", 64),
        ("mgb", 0),
        ("group_bands", 0),
        ("consumer_sms", 0),
        ("max_recv_rows", -1),
    ],
)
def test_a_config_names_the_field(field, value):
    with pytest.raises(ConfigError) as caught:
        Config(**{field: value})
    assert caught.value.field == f"Config.{field}"


def test_experts_must_divide_by_the_ranks():
    with pytest.raises(ConfigError, match="multiple of the 3 ranks"):
        MoEShape(**SIZES).experts_per_rank(3)


def test_the_environment_is_read_from_one_mapping():
    env = Environment.read(
        {
            "TILEFLOW_CACHE": "/c",
            "TILEFLOW_CUDA_INCLUDE": "/a:/b",
            "CUDA_PATH": "/cuda",
            "PMI_SIZE": "3",
            "CUDA_LAUNCH_BLOCKING": "1",
        }
    )
    assert env.cache == Path("/c") and env.cuda_include == (Path("/a"), Path("/b"))
    assert env.cuda_home == Path("/cuda") and env.launcher_size == 3
    assert env.launch_blocking and env.troublesome == {"CUDA_LAUNCH_BLOCKING": "1"}


def test_an_empty_environment_gives_defaults():
    env = Environment.read({})
    assert env.launcher_size == 1 and env.cuda_src is None and not env.launch_blocking


def test_only_config_reads_the_environment():
    package = Path(__file__).resolve().parents[1] / "tileflow"
    readers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"os\.(environ\[|environ\.get|getenv)", path.read_text())
    }
    assert readers <= {"config.py"}
