"""`cumla export` writes the same file for the same input, and says what a file serves."""

import json
from dataclasses import replace

import numpy as np
import pytest

import cumla
from cumla.__main__ import main
from cumla.cli.served_model import Model
from cumla.errors import InputError
from cumla.export import file_of, recorded
from cumla.export.calls import KINDS
from cumla.export.compiled import MISCOMPILING, cubin, nvrtc
from cumla.export.file import read
from cumla.export.header import OPERATIONS, header
from cumla.export.record import ExportError, Limit
from cumla.replay.options import WARM_KINDS
from cumla.specs import SPECS
from cumla.specs.indexer_topk import over_pages
from cumla.specs.inputs import TINY, Inputs
from support import runtime
from support.command_line import error_line


def test_equal_input_gives_equal_bytes():
    files = [
        file_of(recorded(runtime.calls("v32")[:4], runtime.H200), runtime.H200, runtime.without_code) for _ in "ab"
    ]
    assert files[0] == files[1]


def test_a_selection_s_memory_has_room_for_candidate_blocks():
    """With one request the spec's bytes were too few, and with more a selection took two passes."""
    for requests in (1, 3):
        x = Inputs("reference", replace(TINY, requests=requests))
        arguments = over_pages(x, next_n=2, blocks=2)
        spec = SPECS["indexer_topk"]
        needed = spec.scratch(arguments)
        want = cumla.indexer_topk(**arguments)
        got = cumla.indexer_topk(**arguments, workspace=aligned_bytes(needed))
        np.testing.assert_array_equal(got, want)
        with pytest.raises(ValueError, match="workspace: got"):
            cumla.indexer_topk(**arguments, workspace=aligned_bytes(needed // requests - 1))


def aligned_bytes(size):
    memory = np.zeros(size + 256, np.uint8)
    return memory[-memory.ctypes.data % 256 :][:size]


def test_every_call_of_a_model_has_a_record(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(runtime.file("v4"))
    tables = read(path)
    assert len(tables["records"]) == len(runtime.calls("v4"))
    assert len(tables["operations"]) == len(OPERATIONS)
    assert tables["header"][0][5:7] == (90, 132)


def test_struct_members_are_the_function_s_parameters():
    text = header()
    for fields in OPERATIONS:
        assert f"}} cumla_{fields.spec.name}_arguments;" in text
        assert fields.words == len(fields.names) == len(set(fields.names))


def test_a_program_compiles_without_a_device():
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc()
    except InputError as error:
        pytest.skip(str(error))
    program = next(
        x.function.program
        for x in runtime.recorded_quickly(runtime.calls("v4")[:1])[0].sequences[0]
        if x.function.program.file.startswith("common")
    )
    code = cubin(program, 90)
    assert code[:4] == b"\x7fELF"
    assert b"quantize_and_insert_k_cache" in code


def test_a_compiler_that_miscompiles_is_refused(monkeypatch):
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(bindings, "nvrtcVersion", lambda: (0, 13, 1))
    assert 1301 in MISCOMPILING
    with pytest.raises(InputError, match=r"NVRTC 13.1 compiles wrong code for Hopper"):
        nvrtc()


def test_the_command_writes_the_runtime_and_shows_a_file(tmp_path, capsys):
    path = tmp_path / "file"
    path.write_bytes(runtime.file("v4"))
    assert main(["export", "--runtime", str(tmp_path / "c"), "--show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert sorted(x.name for x in (tmp_path / "c").iterdir()) == ["cumla.c", "cumla.h", "cumla_operations.h"]
    assert "capability 9.0, 132 SMs" in shown
    assert "merge_attn_states" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--out, --show, --test, --runtime: got none of them"),
        (["--out", "x", "--capability", "9.9"], "--capability: got 9.9, expected one of"),
        (["--out", "x", "--clusters", "2-66"], "--clusters: got '2-66', expected CTAS:NUMBER"),
        (["--out", "x", "--ranks", "2"], "--ranks"),
        (["--show", "/does/not/exist"], "--show: "),
    ],
)
def test_wrong_options(capsys, options, message):
    assert message in error_line(capsys, ["export", *options])


def test_a_file_of_something_else(tmp_path, capsys):
    (tmp_path / "x").write_bytes(b"PK" + bytes(100))
    assert "is no file of cumla export" in error_line(capsys, ["export", "--show", tmp_path / "x"])
    damaged = bytearray(runtime.file("v4"))
    damaged[-1] ^= 1
    (tmp_path / "x").write_bytes(damaged)
    assert "is damaged" in error_line(capsys, ["export", "--show", tmp_path / "x"])


def test_every_kind_of_model_has_calls():
    assert set(KINDS) == set(WARM_KINDS) == set(runtime.MODELS)


def test_a_config_decides_widths_of_norms_and_groups(tmp_path):
    """Ranks share the groups of the output's heads, and not the queries' latent."""
    sizes = {"model_type": "deepseek_v4", "hidden_size": 4096, "num_attention_heads": 64, "q_lora_rank": 768,
             "o_groups": 16, "o_lora_rank": 1024, "compress_ratios": [0, 4, 128], "num_hidden_layers": 3}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    model = Model.from_config(tmp_path / "config.json", 4)
    assert (model.q_rank, model.o_groups, model.heads) == (768, 4, 16)
    assert (Model("v4", 8, 512).o_groups, Model("v32", 8, 2048).o_groups) == (1, 0)


def test_launches_beyond_a_call_s_limits_are_an_error():
    """A limit that the recorded sizes exceed would serve launches that nothing checked."""
    call = runtime.calls("v4")[0]
    limit = Limit("k.shape[0]", "k.strides[0]", 0, 1)
    with pytest.raises(ExportError, match=r"k.shape\[0\] \* k.strides\[0\] is [0-9]+ to"):
        recorded([replace(call, limits=(limit,))], runtime.H200)
