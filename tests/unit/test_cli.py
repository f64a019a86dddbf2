"""The command line: options from the configuration classes, errors on one line, and the commands with the toy model."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvern import SamplingParams
from kvern.cli.main import build_parser, main
from kvern.cli.options import describe, normalize, read_configs
from kvern.config import EngineConfig, InvalidConfig, ServerConfig, options
from kvern.testing.toy import reference_tokens
from kvern.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[2]
TOY = ["--model", "toy:history-hash", "--max-model-len", "500", "--temperature", "0", "--log-level", "error"]


parser = cache(build_parser)  # it takes longest


def read(*arguments: str) -> tuple[ServerConfig, EngineConfig]:
    args = parser().parse_args(normalize(["serve", *arguments]))
    server, engine = read_configs(args, ServerConfig, EngineConfig)
    return server, engine


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands set up the log of their process; this one is pytest's."""
    monkeypatch.setattr("kvern.log.logging.basicConfig", lambda **_: None)


def test_without_options_everything_is_default() -> None:
    assert read() == (ServerConfig(), EngineConfig())


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_option_has_its_flag(config: type[Any]) -> None:
    samples: dict[type, Any] = {int: 7, float: 0.5, str: "64MiB", dict: {"weights": {"a": 2.0}}}
    special = {"kv_connector": "file:folder"}
    for option in options(config):
        flag = "--" + option.name.replace("_", "-")
        if option.type is bool:
            for value, text in ((True, flag), (False, "--no-" + flag[2:])):
                found = read(text)[config is EngineConfig]
                assert getattr(found, option.name) is value
            continue
        value = option.choices[-1] if option.choices else special.get(option.name, samples[option.type])
        text = json.dumps(value) if option.type is dict else str(value)
        for arguments in ([flag, text], [f"{flag}={text}"], ["--" + option.name, text]):
            assert getattr(read(*arguments)[config is EngineConfig], option.name) == value


def test_the_model_may_be_positional() -> None:
    args = build_parser().parse_args(["serve", "some-model", "--port", "0"])
    assert args.model_argument == "some-model"


def test_a_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "kvern.yaml"
    file.write_text("max-num-seqs: 5\nblock_size: 8\nenable_prefix_caching: false\nport: 9000\nwatermark: 0\n")
    server, engine = read("--config", str(file), "--block-size", "32")
    assert (engine.max_num_seqs, engine.block_size, engine.enable_prefix_caching) == (5, 32, False)
    assert (server.port, engine.watermark) == (9000, 0.0)
    assert read("--config", str(file), "--enable-prefix-caching")[1].enable_prefix_caching
    args = build_parser().parse_args(["generate", "--config", str(file)])
    (engine,) = read_configs(args, EngineConfig, known=[ServerConfig])
    assert engine.max_num_seqs == 5


def test_an_empty_file_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "kvern.yaml"
    file.write_text("# nothing yet\n")
    assert read("--config", str(file)) == (ServerConfig(), EngineConfig())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seqz: 5", "max_num_seqz.*did you mean 'max_num_seqs'"),
        ("max_num_seqs: many", "max_num_seqs.*'many'"),
        ("max_num_seqs: 0", "max_num_seqs.*>= 1.*0"),
        ("dtype: int8", "dtype must be one of auto, float32, bfloat16, got 'int8'"),
        ("- a\n- b", "option: value"),
        ("a: [", "is not YAML"),
    ],
)
def test_errors_in_a_file_name_the_option(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "kvern.yaml"
    file.write_text(content)
    with pytest.raises(InvalidConfig, match=message):
        read("--config", str(file))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read: No such file"):
        read("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-num-seqs", "0"], "kvern serve: error: max_num_seqs: Expected `int` >= 1, got 0"),
        (["serve", "--max-num-seqs", "x"], "kvern serve: error: max_num_seqs must be an integer, got 'x'"),
        (["serve", "--watermark", "1.5"], "kvern serve: error: watermark: Expected `float` < 1.0, got 1.5"),
        (
            ["serve", "--kernels", "fast"],
            "kvern serve: error: kernels must be one of auto, native, reference, got 'fast'",
        ),
        (["serve", "--max-num-seq", "1"], "unknown argument '--max-num-seq', did you mean '--max-num-seqs'?"),
        (["serve", "--kv-cache-memory", "lots"], "kv_cache_memory"),
        (
            ["bench", "latency", "--max-num-seq", "1"],
            "unknown argument '--max-num-seq', did you mean '--max-num-seqs'?",
        ),
        (["bench", "throughput", "--max-num-seqs", "0"], "kvern bench: error: max_num_seqs: Expected `int` >= 1"),
        (["serve", "one", "two"], "unknown argument 'two'"),
        (["generate", "x", *TOY, "--max-model-len", "99999"], "max_model_len 99999"),
        (["generate", "x", *TOY, "--top-p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["generate", "x", *TOY, "--max-tokens", "few"], "max_tokens must be an integer, got 'few'"),
        (["generate", "", *TOY], "at least one token"),
        (["generate", "x", "--model", "toy:nothing"], "unknown toy model 'toy:nothing'"),
    ],
)
def test_what_cannot_be_is_said_on_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["serve", "--port"],
        ["bench"],
        ["bench", "throughput", "--input-len", "9:8"],
        ["bench", "latency", "--output-len", "1"],
    ],
)
def test_what_cannot_be_parsed_is_said_on_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def expected_text(prompt: list[int], count: int) -> str:
    return ByteTokenizer().decode(reference_tokens(prompt, count))


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ByteTokenizer().encode("Once")
    assert main(["generate", "Once", *TOY, "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == expected_text(prompt, 9) + "\n"
    stop = expected_text(prompt, 9)[4:6]
    assert main(["generate", "Once", *TOY, "--max-tokens", "9", "--stop", stop]) == 0
    assert capsys.readouterr().out == expected_text(prompt, 9)[:4] + "\n"


def test_generate_reads_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once"))
    assert main(["generate", *TOY, "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == expected_text(ByteTokenizer().encode("Once"), 9) + "\n"


def chat(monkeypatch: pytest.MonkeyPatch, lines: list[str], *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    return main(["chat", *TOY, "--max-tokens", "6", *arguments])


def test_chat_from_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The conversation grows, /reset forgets it, and a message that is too long leaves it as it was."""
    assert chat(monkeypatch, ["hello", "again", "x" * 600, "", "/reset", "hello", "/exit", "never"]) == 0
    out, err = capsys.readouterr()
    first, second, third, *rest = out.splitlines()
    assert first == third != second and rest == []
    assert "/reset starts anew" in err
    assert chat(monkeypatch, ["hello"], "--system", "Be brief.") == 0
    assert capsys.readouterr().out.splitlines()[0] != first


def test_models_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m-instruct" in out and "toy:history-hash" in out
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("kvern ")


@pytest.mark.parametrize("built", [True, False])
def test_doctor(
    built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvern.kernels.cpu import library

    class Engine:
        def __init__(self, threads: int, isa: str = "") -> None:
            if isa == "amx":
                raise library.KernelsMissing("no amx")
            self.isa = isa or "avx512"

    def load() -> None:
        if not built:
            raise library.KernelsMissing("no C++ compiler was found")

    monkeypatch.setattr(library, "load", load)
    monkeypatch.setattr(library, "NativeEngine", Engine)
    monkeypatch.setattr("kvern.cli.doctor._cpuinfo", lambda field: "avx2 fma" if field == "flags" else "A Processor")
    monkeypatch.setattr("kvern.cli.doctor._huge_pages", lambda: "madvise")
    monkeypatch.setenv("KVERN_CACHE", str(tmp_path))
    assert main(["doctor", "--json"]) == (0 if built else 1)
    found = json.loads(capsys.readouterr().out)
    assert {"kvern", "python", "torch", "numpy"} == found["versions"].keys()
    assert found["auto"] == {
        "model": "smollm2-135m-instruct", "kernels": None, "reason": "it has not been fetched yet"
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    assert main(["doctor"]) == (0 if built else 1)
    lines = capsys.readouterr().out.splitlines()
    if built:
        assert found["problems"] == [] and found["native"]["isa"] == "avx512"
        assert found["native"]["isas"]["avx2"] is None and "no avx512f" in found["native"]["isas"]["amx"]
        assert any(line.split() == ["kernels", "native,", "avx512"] for line in lines)
    else:
        assert not found["native"]["built"] and "install" in found["problems"][0]
        assert lines[-1].startswith("problem") and "no C++ compiler was found" in lines[-1]


def test_settings_are_described_without_secrets() -> None:
    text = describe(EngineConfig(), ServerConfig(api_key="s3cret"))
    assert "max_num_seqs=64" in text and "api_key=***" in text and "s3cret" not in text
    assert "max_model_len" not in text  # derived later


def kvern(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvern.cli.main", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )  # fmt: skip


LIGHT = [
    ["--help"],
    ["serve", "--help"],
    ["bench", "latency", "--help"],
    ["doctor", "--help"],
    ["version"],
    ["serve", "--max-num-seqs", "0"],
]


@pytest.mark.parametrize("arguments", LIGHT)
def test_a_light_command_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from kvern.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    pass
heavy = {{"torch", "numpy", "transformers", "starlette", "uvicorn", "rich", "zmq", "jinja2"}} & sys.modules.keys()
assert not heavy, heavy
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


ON_AND_ON = ["generate", "on and on", *TOY, "--max-model-len", "8000", "--max-tokens", "7000"]


def test_ctrl_c_ends_quietly() -> None:
    with kvern(*ON_AND_ON, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == ""


def test_a_closed_pipe_ends_quietly() -> None:
    with kvern(*ON_AND_ON) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(20)
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr.read() == ""


def test_the_sampling_defaults_are_valid() -> None:
    args = build_parser().parse_args(["chat"])
    from kvern.cli.sampling import read_sampling

    assert read_sampling(args) == SamplingParams(temperature=0.7, max_tokens=None)
