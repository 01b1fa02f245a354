"""The command line on the embedded pair: what it prints, what it writes, and how it ends."""

import contextlib
import functools
import os
import re
import subprocess
import sys

import pytest

import ddlab
from ddlab import cli
from ddlab.trace import Trace

SHORT = ["--max-new-tokens", "12", "--budget", "12", "--prompt", "What is a tree?"]


def run(capsys, *arguments):
    """Exit status, stdout and stderr of a command run in this process."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as end:  # argparse leaves this way
        status = end.code
    return status, *capsys.readouterr()


@pytest.fixture(scope="module", autouse=True)
def one_pair():
    """The embedded pair, loaded once for all commands of this file."""
    load = ddlab.load_pair
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ddlab, "load_pair", functools.cache(load))
        yield


# ---- decode ------------------------------------------------------------------------------------


def test_decode_prints_rounds_and_the_text_of_plain_decoding(capsys):
    status, out, err = run(capsys, "decode", *SHORT)
    plain = ddlab.generate(ddlab.load_pair(None, None, device_map=None, dtype=None, attention=None),
                           "What is a tree?", method="ar", max_new_tokens=12)  # fmt: skip
    assert (status, err) == (0, "")
    assert out.rstrip("\n").endswith(f"\n{plain.text}")
    assert re.search(r"^ +0 +\d+ +\d+ +\d+ +\d+  (mismatch|exhausted|stop_token|length) ", out, re.MULTILINE)
    assert "tokens per round" in out and "accepted drafts per round" in out


def test_decode_prints_what_the_trace_prints(capsys, tmp_path):
    status, out, _ = run(capsys, "decode", *SHORT, "--method", "dflash", "--trace", tmp_path / "run")
    trace = Trace.load(tmp_path / "run")
    assert status == 0 and trace.method == "dflash" and len(trace.output_ids) == 12
    assert out == f"{trace.to_text()}\n\ntrace: {tmp_path / 'run'}\n"


def test_decode_reads_a_prompt_from_a_file(capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("Wie heißt du?\n", "utf-8")
    by_file = run(capsys, "decode", "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", "3")
    assert by_file == run(capsys, "decode", "--prompt", "Wie heißt du?", "--max-new-tokens", "3")
    assert by_file[0] == 0


def test_settings_reach_the_decoder(capsys, tmp_path):
    settings = ["--temperature", "0.7", "--seed", "5", "--budget", "3", "--max-new-tokens", "4"]
    run(capsys, "decode", *settings, "--trace", tmp_path / "run")
    kept = Trace.load(tmp_path / "run").settings
    assert (kept["temperature"], kept["seed"], kept["budget"], kept["max_new_tokens"]) == (0.7, 5, 3, 4)


# ---- report ------------------------------------------------------------------------------------


def test_report_decodes_with_every_method_and_audits(capsys, tmp_path):
    status, out, err = run(capsys, "report", *SHORT, "--out", tmp_path / "r.html")
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()[:4]
    assert [line.split()[0].rstrip(",") for line in lines] == ["ar", "dflash", "ddtree"]
    assert all(re.search(r" exact +yes +12 ", line) for line in lines)
    assert "tokens per round" in head and out.endswith(f"report: {tmp_path / 'r.html'}\n")
    content = (tmp_path / "r.html").read_text("utf-8")
    assert content.count("✓ exact") >= 3 and "What is a tree?" in content


def test_report_decodes_with_the_methods_asked_for(capsys, tmp_path):
    status, out, _ = run(capsys, "report", *SHORT, "--method", "ddtree", "--budget", "5", "--out", tmp_path / "r.html")
    assert status == 0 and "ddtree, budget 5" in out and "dflash" not in out


def test_a_real_divergence_ends_with_status_1(capsys, tmp_path, monkeypatch):
    flattened = functools.partial(ddlab.Decoder, linear_state="flattened")
    monkeypatch.setattr(ddlab, "Decoder", flattened)
    arguments = [
        "--method",
        "ddtree",
        "--budget",
        "8",
        "--max-new-tokens",
        "16",
        "--out",
        tmp_path / "r.html",
    ]
    status, out, _ = run(capsys, "report", *arguments)
    assert status == 1 and "NOT EXACT" in out and "flattened" in out
    assert "✕ NOT EXACT" in (tmp_path / "r.html").read_text("utf-8")


# ---- progress ----------------------------------------------------------------------------------


def test_progress_is_on_stderr_and_only_when_asked_for(capsys):
    _, silent_out, silent_err = run(capsys, "decode", *SHORT)
    _, out, err = run(capsys, "decode", *SHORT, "--progress")
    assert silent_err == "" and out == silent_out
    assert re.search(r"ddtree: round 1, \d+ of 12 tokens, [\d.]+ tokens/s", err)


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode", "--prompt", ""], "prompt is empty"),
        (["decode", "--budget", "-1"], "budget"),
        (["decode", "--temperature", "-1"], "temperature"),
        (["decode", "--max-new-tokens", "-5"], "max_new_tokens"),
        (["decode", "--max-new-tokens", "100000"], "positions"),
        (["decode", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["decode", "--target", "./nowhere", "--drafter", "./nowhere"], "nowhere"),
        (["decode", "--target", "./nowhere"], "need a drafter"),
        (["decode", "--dtype", "float33"], "float33"),
        (["report", "--out", "nowhere/r.html"], "create it first"),
        (["report", "--out", "."], "is a folder"),
        (["bench", "--out", "."], "is a folder"),
        (["compare", "--out", "."], "is a folder"),
    ],
)  # fmt: skip
def test_input_that_does_not_fit_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("ddlab: ") and err.count("\n") == 1 and said in err
    assert list(tmp_path.iterdir()) == []


def test_smollm2_brings_its_drafter(capsys, monkeypatch):
    def load(target, drafter, **_):
        assert (target, drafter) == ("smollm2", None)
        raise OSError("no network")

    monkeypatch.setattr(ddlab, "load_pair", load)
    status, _, err = run(capsys, "decode", "--target", "smollm2")
    assert status == 2 and "no network" in err


@pytest.mark.parametrize("arguments", [[], ["deocde"], ["decode", "--method", "ddtre"], ["decode", "--budget", "many"]])
def test_wrong_usage_is_status_2(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and "usage: ddlab" in err and "Traceback" not in err


def test_a_foreign_trace_folder_is_refused_before_anything_runs(capsys, tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").write_text("years of work")
    monkeypatch.setattr(ddlab, "load_pair", lambda *_, **__: pytest.fail("a model was loaded"))
    status, _, err = run(capsys, "decode", "--trace", tmp_path)
    assert status == 2 and "thesis.tex" in err


def test_a_mistake_of_ours_is_not_called_bad_input(capsys, monkeypatch):
    monkeypatch.setattr(ddlab.Decoder, "verify", lambda self: [][0])
    with pytest.raises(IndexError):
        cli.main(["decode", *SHORT])


def test_an_interrupt_is_a_line_and_keeps_finished_rounds(capsys, tmp_path, monkeypatch):
    step, made = ddlab.Decoder.step, []

    def twice(self):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(step(self))
        return made[-1]

    monkeypatch.setattr(ddlab.Decoder, "step", twice)
    status, _, err = run(capsys, "decode", "--max-new-tokens", "40", "--trace", tmp_path / "run")
    assert status == 130 and "interrupted" in err and "Traceback" not in err
    assert Trace.load(tmp_path / "run").steps == made


# ---- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["decode", "report", "sweep"])
def test_help_has_an_example_that_can_be_run(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    (example,) = re.findall(r"^  (ddlab .*)$", out, re.MULTILINE)
    assert status == 0 and example.startswith(f"ddlab {command} ")
    words = re.findall(r'"[^"]*"|\S+', example)[1:]
    with contextlib.suppress(SystemExit):
        assert cli._parser().parse_args([word.strip('"') for word in words]).run
        return
    pytest.fail(f"the example is not understood: {example}")


def test_version_is_the_packages(capsys):
    assert run(capsys, "--version")[:2] == (0, f"ddlab {ddlab.__version__}\n")


def test_help_loads_no_model_library():
    code = "import sys\nfrom ddlab import cli\ntry: cli.main(['report', '--help'])\nexcept SystemExit: pass\n"
    code += "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.splitlines()[-1] == "set()"


def test_the_module_runs_in_a_terminal_that_is_not_utf8():
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment |= {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ddlab", "decode", "--prompt", "Grüß dich", "--max-new-tokens", "2"]
    child = subprocess.run(command, env=environment, capture_output=True)
    assert child.returncode == 0, child.stderr
    assert b"\\u2423" in child.stdout  # the mark of a space, escaped
