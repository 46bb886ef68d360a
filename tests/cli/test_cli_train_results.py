"""`stitch-run train.yaml`: networks, inputs and losses of all kinds, and their results."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

import stitch
from stitch.cli.train import loss_picture
from stitch.training.checkpoints.checkpoint_format import read_tensors, write_tensors
from tests.support.stitched_models import one
from tests.support.trace_format import checked
from tests.support.training.commands import (
    NET,
    RANDOM_NET,
    TRAIN,
    Cli,
    changed,
    lines,
    losses,
    npz_of,
)

# -- what it can do --------------------------------------------------------------------------------


def test_the_result_file_has_a_line_for_each_step_each_epoch_and_the_end(
    cli: Cli, small: Path
) -> None:
    done = cli("run", "train.yaml", "--result_file=r.jsonl")
    assert done.code == 0 and done.err == ""
    found = lines("r.jsonl")
    kinds = [line["kind"] for line in found]
    assert kinds.count("step") == 60 and kinds.count("epoch") == 6 and kinds[-1] == "final"
    assert set(found[0]) == {"kind", "step", "epoch", "loss", "rate", "seconds"}
    assert [line["step"] for line in found if line["kind"] == "step"] == list(range(1, 61))
    rates = [line["rate"] for line in found if line["kind"] == "step"]
    assert rates[:4] == pytest.approx([0.005, 0.01, 0.015, 0.02])
    assert rates[-1] < 1e-4
    assert set(found[-2]["validation"]) == {"accuracy", "loss"}
    assert found[-1]["held_out"]["accuracy"] > 0.6


def test_a_trace_of_a_training_shows_each_step(cli: Cli, small: Path) -> None:
    assert cli("run", "train.yaml", "--result_file=bare.jsonl").code == 0
    done = cli("run", "train.yaml", "--result_file=r.jsonl", "--trace=t.json.gz")
    assert done.code == 0, done.err
    assert losses("r.jsonl") == losses("bare.jsonl"), "observing changes no result"
    totals = lines("r.jsonl")[-1]["totals"]
    assert totals == lines("bare.jsonl")[-1]["totals"]
    trace = json.loads(gzip.decompress(Path("t.json.gz").read_bytes()))
    times = ("seconds", "program_seconds")
    for name, value in totals.items():
        assert trace["otherData"][name] == (pytest.approx(value) if name in times else value)
    found = checked(trace)
    programs = [each.name for each in found.of("program")]
    assert totals["programs"] == len(programs)
    assert programs.count("net_update") == 60
    assert sum(each.args["copies"] for each in found.of("copy")) == totals["copies"]
    assert ("net_update", "net") in found.ways()


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "torch"])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_accumulation_clipping_and_recomputation_train_on_all_executors(
    cli: Cli, small: Path, executor: str, recompute: str
) -> None:
    changed(("target: tiny", f"executor: {executor}\nrecompute: {recompute}\nclip_grad_norm: 1\n"
             "accumulation_steps: 2\ntarget: tiny"))  # fmt: skip
    done = cli("run", "train.yaml", "--result_file=r.jsonl", "--max_copies=9")
    assert done.code == 0, done.err
    found = losses("r.jsonl")
    assert len(found) == 30 and found[-1][1] < found[0][1]
    assert lines("r.jsonl")[-1]["last_planned_step"] <= 3


def test_the_same_network_from_four_forms_of_file_trains_alike(cli: Cli, small: Path) -> None:
    plain = TRAIN.replace("schedule: {name: warmup, warmup_steps: 4, then: cosine}\n", "")
    changed(text=plain)
    assert cli("run", "train.yaml", "--result_file=yaml.jsonl").code == 0
    model = stitch.compile("net.yaml", optimizer=stitch.AdamW(lr=0.5), target="tiny",
                           loss="sparse_categorical_crossentropy")  # fmt: skip
    with Path("net.json").open("w") as file:
        model.dump(file)
    model.save_programs("programs")
    assert model.training is not None
    npz_of(model.training.values)
    (small / "nets.py").write_text(
        "from pathlib import Path\nfrom stitch.frontend import load_module\n"
        "def make():\n    return load_module(Path(__file__).parent / 'net.yaml')\n"
    )
    listed = ", ".join(f"programs/{r}.ttb" for r in ("forward", "loss", "backward", "update"))
    forms = {
        "json": "model: net.json",
        "python": "model: nets.py:make",
        "programs": f"model: [{listed}]\nweights: start.npz",
    }
    for name, text in forms.items():
        changed(("model: net.yaml", text), text=plain)
        done = cli("run", "train.yaml", f"--result_file={name}.jsonl")
        assert done.code == 0, done.err
        assert losses(f"{name}.jsonl") == losses("yaml.jsonl"), name
        assert lines(f"{name}.jsonl")[-1]["held_out"] == lines("yaml.jsonl")[-1]["held_out"]


def test_torch_modules_and_onnx_models_with_a_symbolic_batch_train(cli: Cli, small: Path) -> None:
    (small / "torch_net.py").write_text(RANDOM_NET)
    text = TRAIN.replace("inputs: {x: xs}", "inputs: xs")
    changed(("model: net.yaml", "model: torch_net:make"), text=text)
    done = cli("run", "train.yaml", "--result_file=t.jsonl", "--output=t.ttb")
    assert done.code == 0, done.err
    assert lines("t.jsonl")[-1]["held_out"]["accuracy"] > 0.6
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights = {"w1": rng.standard_normal((4, 16)), "w2": rng.standard_normal((16, 3))}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w1"], ["s"]), helper.make_node("Relu", ["s"], ["h"]),
         helper.make_node("MatMul", ["h", "w2"], ["y"])],
        "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)],
                                ir_version=10), "net.onnx")  # fmt: skip
    changed(("model: net.yaml", "model: net.onnx"))
    done = cli("run", "train.yaml", "--result_file=o.jsonl")
    assert done.code == 0, done.err
    assert lines("o.jsonl")[-1]["held_out"]["accuracy"] > 0.6


TWO_INPUTS = """\
name: two
inputs:
  word: {shape: [8], type: int64}
  x: {shape: [8, 4], type: float32}
parameters:
  table: {shape: [5, 4], init: {kind: randn, seed: 1}}
  w: {shape: [4, 3], init: {kind: randn, seed: 2}}
operations:
  - e = Gather(table, word)
  - s = Add(e, x)
  - y = MatMul(s, w)
outputs: [y]
"""


def test_several_inputs_come_from_files_of_several_kinds(cli: Cli, small: Path) -> None:
    with np.load("data.npz") as arrays:
        xs, ys = arrays["xs"], arrays["ys"]
    rows = np.arange(120)
    np.save("words.npy", (rows % 5).astype(np.uint8))
    with Path("more.safetensors").open("wb") as file:
        write_tensors(file, {"pixels": (xs * 100).astype(np.int16), "other": xs})
    (small / "net.yaml").write_text(TWO_INPUTS)
    pixels = "{array: pixels, file: more.safetensors, scale: 0.01, shift: -0.5}"
    test = "{file: test.npz, inputs: {word: w, x: x}, labels: y}"
    np.savez("test.npz", w=rows[:30] % 5, x=xs[:30] - 0.5, y=ys[:30])
    changed(
        ("{x: xs}", f"{{x: {pixels}, word: words.npy}}"), ("held_out: out", f"held_out: {test}")
    )
    done = cli("run", "train.yaml", "--result_file=r.jsonl", "--epochs=20")
    assert done.code == 0, done.err
    found = losses("r.jsonl")
    assert len(found) == 20 * 12 and found[-1][1] < found[0][1]
    assert lines("r.jsonl")[-1]["held_out"]["accuracy"] > 0.7
    changed(("{x: xs}", f"{{x: {pixels}}}"))
    assert "the model also needs word" in cli("run", "train.yaml").err
    changed(("{x: xs}", f"{{x: {pixels}, word: {{array: pixels, file: more.safetensors}}}}"))
    assert "input word takes rows of []" in cli("run", "train.yaml").err
    changed(("{x: xs}", f"{{x: {pixels}, word: {{array: words.npy, scale: 2}}}}"))
    assert "takes int64: scale and shift cannot be" in cli("run", "train.yaml").err


def test_a_trained_batch_normalization_uses_its_running_statistics(cli: Cli, small: Path) -> None:
    line = "  - n, m_next, v_next = BatchNormalization(s, g, b1, m, v, training_mode=1)\n"
    text = NET.replace("  - h = Relu(s)", line + "  - h = Relu(n)")
    text = text.replace("  w2:", "  g: {shape: [16], init: ones}\n  w2:", 1)
    state = "  m: {shape: [16], type: float32, kind: state}\n"
    text = text.replace("parameters:", state + state.replace("m:", "v:") + "parameters:", 1)
    text = text.replace("outputs: [y]", "outputs: {y: {}, m: {value: m_next}, v: {value: v_next}}")
    (small / "net.yaml").write_text(text)
    npz_of({"m": np.zeros(16, np.float32), "v": np.ones(16, np.float32)})
    changed(("model: net.yaml", "model: net.yaml\nweights: start.npz"))
    done = cli("run", "train.yaml", "--output=m.ttb", "--output=m.safetensors", "--epochs=3")
    assert done.code == 0, done.err
    weights = read_tensors("m.safetensors").tensors
    assert set(weights) == {"w1", "b1", "g", "w2", "m", "v"} and weights["m"].any()
    with np.load("data.npz") as arrays:
        x = arrays["xs"][:8]
    with stitch.open_device("tiny") as device:
        found = one(device.load("m.ttb")(x)).numpy()
    s = x @ weights["w1"] + weights["b1"]
    n = (s - weights["m"]) / np.sqrt(weights["v"] + 1e-5) * weights["g"] + weights["b1"]
    np.testing.assert_allclose(found, np.maximum(n, 0) @ weights["w2"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "metrics", "labels"),
    [("mse", "[loss]", "real2"), ("bce_with_logits", "[accuracy, loss]", "hot"),
     ("categorical_crossentropy", "[accuracy, loss]", "hot"), ("identity", "[]", "ys")],
)  # fmt: skip
def test_each_loss_trains_and_its_metrics_are_those_of_numpy(
    cli: Cli, small: Path, loss: str, metrics: str, labels: str
) -> None:
    with np.load("data.npz") as arrays:
        held = dict(arrays)
    held["hot"] = np.eye(3, dtype=np.float32)[held["ys"]]
    held["real2"] = np.tanh(held["xs"][:, :3])
    np.savez("data.npz", **held)
    lr = "lr: 0.0" if loss == "identity" else "lr: 0.02"
    changed(("sparse_categorical_crossentropy", loss), ("[accuracy, loss]", metrics),
            ("labels: ys", f"labels: {labels}"), ("lr: 0.02", lr))  # fmt: skip
    done = cli("run", "train.yaml", "--result_file=r.jsonl", "--output=w.safetensors")
    assert done.code == 0, done.err
    final = lines("r.jsonl")[-1]["held_out"]
    w, x, y = read_tensors("w.safetensors").tensors, held["xs"][100:], held[labels][100:]
    pred = np.maximum(x @ w["w1"] + w["b1"], 0) @ w["w2"]
    shifted = pred - pred.max(axis=1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    expected = {
        "mse": lambda: np.mean((pred - y) ** 2),
        "bce_with_logits": lambda: np.mean(np.logaddexp(0, pred) - pred * y),
        "categorical_crossentropy": lambda: -np.mean((log * y).sum(axis=1)),
    }
    assert final == {} or final["loss"] == pytest.approx(expected[loss](), rel=1e-4)
    assert (final == {}) == (loss == "identity")


def test_a_picture_needs_matplotlib_and_says_which_extra_brings_it(
    cli: Cli, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "stitch.cli.train.loss_picture")
    monkeypatch.delattr("stitch.cli.train.loss_picture")
    done = cli("run", "train.yaml", "--plot=loss.png")
    assert done.code == 2 and "pip install stitch-runtime[plot]" in done.err


def test_a_picture_shows_the_losses_of_all_steps_also_those_before_a_resume(
    cli: Cli, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    draw = loss_picture.drawn

    def noted(title: str, kind: str, losses: Any, validation: Any) -> bytes:
        drawn.update(batch=list(losses), validation=list(validation))
        return draw(title, kind, losses, validation)

    monkeypatch.setattr(loss_picture, "drawn", noted)
    words = ("--checkpoint_dir=c", "--result_file=r.jsonl")
    assert cli("run", "train.yaml", "--epochs=2", *words).code == 0
    done = cli("run", "train.yaml", *words, "--resume", "--plot=loss.png")
    assert done.code == 0, done.err
    assert drawn["batch"] == losses("r.jsonl") and len(drawn["batch"]) == 60
    assert [step for step, _ in drawn["validation"]] == [10, 20, 30, 40, 50, 60]
    picture = imread("loss.png")
    assert picture.shape[:2] == (450, 800) and np.ptp(picture) > 0.5
    done = cli("run", "train.yaml", "--plot=loss.doc")
    assert done.code == 2 and ".png," in done.err and ".svg" in done.err
