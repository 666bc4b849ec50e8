"""The ComfyUI nodes against a stand-in that behaves as ComfyUI does: `comfy_stand_in`."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy_stand_in as comfy
import pytest
import torch
from comfy_stand_in import SHAPE, BaseModel, CFGGuider, DiscreteEPS, DualCFGGuider, FlowCONST, Patcher, prompt
from torch import Tensor

from problems import random_calibration
from steindiff import __version__, sample
from steindiff.calibrating import Recipe
from steindiff.grids import Karras
from steindiff.integrations.kdiffusion import sample_steindiff, sigmas_of
from steindiff.levels import Levels
from steindiff.schedules import EDM
from steindiff.solvers import SOLVERS, DPMSolverMultistep

ROOT = Path(__file__).parents[2]
FOLDER = comfy.PACK
ZEROS = torch.zeros(2, *SHAPE)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[ModuleType]:
    with comfy.imported(tmp_path) as pack:
        yield pack


@pytest.fixture(autouse=True)
def inference_mode():
    with torch.inference_mode():
        yield


def noise(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def node(nodes: ModuleType, name: str) -> Any:
    return nodes.NODE_CLASS_MAPPINGS[name]()


def guider_of(sampling: type = DiscreteEPS, seed: int = 0, **options: Any) -> CFGGuider:
    return CFGGuider(Patcher(BaseModel(sampling(), seed)), **options)


COUNTS = {"evaluations": 4, "samples": 4, "search": 0, "batch": 1}


def calibrate(nodes: ModuleType, guider: CFGGuider, name: str = "mine", **inputs: Any) -> tuple[Any, Tensor, str]:
    latent = {"samples": torch.zeros(3, *inputs.pop("shape", SHAPE))}
    inputs = {"solver": "dpmpp-2m", **COUNTS, **inputs}
    out = node(nodes, "SteinDiffCalibrate").calibrate(guider=guider, latent_image=latent, name=name, **inputs)
    assert out["ui"]["text"] == [out["result"][2]]
    return out["result"]


def run(nodes: ModuleType, guider: CFGGuider, calibration: Any, sigmas: Tensor | None = None, **inputs: Any) -> Tensor:
    (sampler,) = node(nodes, "SteinDiffSampler").get_sampler("auto", calibration, **inputs)
    given = sigmas_of(calibration) if sigmas is None else sigmas
    return guider.sample(noise(), ZEROS, sampler, given, disable_pbar=True)


def test_node_contract(nodes: ModuleType):
    assert set(nodes.NODE_CLASS_MAPPINGS) == set(nodes.NODE_DISPLAY_NAME_MAPPINGS)
    for cls in nodes.NODE_CLASS_MAPPINGS.values():
        inputs = cls.INPUT_TYPES()
        assert set(inputs) <= {"required", "optional", "hidden"}
        assert isinstance(cls.RETURN_TYPES, tuple)
        assert len(cls.OUTPUT_TOOLTIPS) == len(cls.RETURN_TYPES)
        assert callable(getattr(cls, cls.FUNCTION))
        assert cls.CATEGORY.startswith("sampling/custom_sampling")
        assert len(cls.DESCRIPTION) > 20
        for group in inputs.values():
            for kind, options in group.values():
                assert isinstance(kind, str | list)
                assert options["tooltip"].endswith(".")
    assert not nodes.output.exists(), "/object_info makes no folders"


def test_registry_metadata():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())
    assert "comfyui" not in project["project"]["name"].lower()
    assert {"name", "version", "license", "dependencies"} <= set(project["project"])
    assert {"PublisherId", "DisplayName"} <= set(project["tool"]["comfy"])
    library = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["project"].get("urls") == library.get("urls"), "one address, or none"
    assert project["project"]["version"] == __version__
    assert project["project"]["dependencies"] == [f"steindiff>={__version__}"]
    assert (FOLDER / "icon.svg").is_file()
    assert (FOLDER / project["project"]["license"]["file"]).is_file()
    assert (FOLDER / "requirements.txt").read_text().split() == project["project"]["dependencies"]


def test_example_workflow(nodes: ModuleType):
    """Every link joins an output to an input of the same type, and our nodes' widgets are all there, in order."""
    (path,) = (FOLDER / "example_workflows").glob("*.json")
    flow = json.loads(path.read_text())
    by_id = {item["id"]: item for item in flow["nodes"]}
    assert {"SteinDiffCalibrate", "SteinDiffSampler"} <= {item["type"] for item in flow["nodes"]}
    for number, source, output, sink, entry, kind in flow["links"]:
        assert by_id[source]["outputs"][output]["type"] == kind
        assert number in by_id[source]["outputs"][output]["links"]
        assert by_id[sink]["inputs"][entry]["type"] == kind
        assert by_id[sink]["inputs"][entry]["link"] == number
    for item in flow["nodes"]:
        if (cls := nodes.NODE_CLASS_MAPPINGS.get(item["type"])) is None:
            continue
        every = {k: v for group in cls.INPUT_TYPES().values() for k, v in group.items()}
        widgets = [v for v in every.values() if isinstance(v[0], list) or v[0] in ("INT", "STRING", "BOOLEAN")]
        assert len(item["widgets_values"]) == len(widgets)
        for value, (kind, _) in zip(item["widgets_values"], widgets, strict=True):
            assert not isinstance(kind, list) or value in kind
        assert {entry["name"] for entry in item["inputs"]} <= set(every)
        assert [out["type"] for out in item["outputs"]] == list(cls.RETURN_TYPES)


def test_a_plain_clone_loads(tmp_path: Path):
    """The repository itself in custom_nodes/, nothing installed: the package is found beside the nodes."""
    code = f"""
import importlib.util, sys
sys.path[:] = [p for p in sys.path if not p.endswith("src")]
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
for name in ("rich", "typer", "matplotlib", "PIL", "diffusers"):
    sys.modules[name] = None
from pathlib import Path
import comfy_stand_in
sys.modules.update(comfy_stand_in.modules(Path({str(tmp_path)!r}))[0])
name = {str(ROOT)!r}.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, {str(ROOT / "__init__.py")!r})
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
print(sorted(module.NODE_CLASS_MAPPINGS))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={})
    assert "SteinDiffSampler" in done.stdout, done.stderr


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
class TestCalibrationsOfPipelines:
    """One made in diffusers, replayed here, and the other way round."""

    @staticmethod
    def made(prediction: str) -> tuple[Any, Any, Any]:
        """A pipeline, its denoiser, and a calibration of it that tells the network other levels."""
        pytest.importorskip("diffusers")
        pytest.importorskip("transformers")
        import hosts

        from steindiff.integrations import diffusers as ours
        from steindiff.integrations.diffusers.capture import capture

        pipe, call = hosts.HOSTS["stable_diffusion"].build()
        call.pop("guidance_rescale", None)
        pipe.scheduler.register_to_config(prediction_type=prediction)
        recipe = Recipe(seeds=range(10**6, 10**6 + 4), search=None, steps=8, rivals=())
        found = ours.calibrate(pipe, nfe=5, recipe=recipe, progress=False, **call)
        assert found.conditions["prediction"] == prediction
        schedule, levels = found.levels.schedule, list(found.levels)
        for i in (1, 3):
            told = 0.9 + 0.05 * i
            levels[i] = levels[i]._replace(t=schedule.at(levels[i].lam - math.log(told)).t, told=told)
        found = replace(found, levels=Levels(tuple(levels), schedule))
        return pipe, capture(pipe, ours.scheduler_for(pipe.scheduler, found.solver), **call), found

    def test_one_of_diffusers_replays_here_as_in_our_loop(self, nodes: ModuleType):
        _, captured, calibration = self.made("epsilon")
        schedule, network = captured.family.schedule, replace(captured.network, samples=(0, 1))

        class Host(CFGGuider):
            """The pipeline's network in ComfyUI's coordinates: it is asked for y = x/α at σ/α."""

            def predict_noise(self, x: Tensor, sigma: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                level = schedule.at(-math.log(float(sigma[0])))
                return x - float(sigma[0]) * network(level.alpha * x, torch.full((len(x),), level.t))

        guider = Host(Patcher(BaseModel(DiscreteEPS())))
        found = run(nodes, guider, calibration, check=False)
        first = calibration.levels[0]
        expected = sample(
            captured.denoiser((0, 1)),
            noise() * first.sigma,
            calibration.levels,
            calibration.solver,
            calibration.replay(),
        ).x
        assert guider.calls == 5
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def test_one_of_another_prediction_is_refused(self, nodes: ModuleType):
        *_, calibration = self.made("v_prediction")
        with pytest.raises(ValueError, match="that works for noise prediction only"):
            run(nodes, guider_of(), calibration, check=False)

    def test_one_of_comfyui_is_refused_by_pipelines(self, nodes: ModuleType):
        """It does not say of which network and guidance it is, and its levels are those of another process."""
        pipe, *_ = self.made("epsilon")
        from steindiff.integrations import diffusers as ours

        calibration, *_ = calibrate(nodes, guider_of())
        with pytest.raises(ValueError, match="does not record its network and guidance"):
            ours.stabilize(pipe, calibration)
        with pytest.raises(ValueError, match=r"stein_calibration: at t = .* but this VariancePreserving scheduler has"):
            ours.stabilize(pipe, calibration, check=False)


@pytest.mark.parametrize("sampling", [DiscreteEPS, FlowCONST])
@pytest.mark.parametrize("solver", ["ddim", "dpmpp-2m", "unipc-bh2-2", "heun", "ipndm-3"])
def test_sampler_node(nodes: ModuleType, sampling: type, solver: str):
    guider = guider_of(sampling)
    (sampler,) = node(nodes, "SteinDiffSampler").get_sampler(solver)
    high = 0.98 if sampling is FlowCONST else 10.0
    sigmas = torch.cat([torch.linspace(high, 0.05, 6), torch.zeros(1)])
    told = []
    out = guider.sample(noise(), ZEROS, sampler, sigmas, callback=lambda *a: told.append(a), disable_pbar=True, seed=1)
    assert [(i, steps) for i, _, _, steps in told] == [(i, 6) for i in range(6)]
    assert torch.equal(told[0][2], noise() * sigmas[0])
    guider.inner_model = guider.model_patcher.model
    expected = sample_steindiff(
        lambda x, sigma: guider(x, sigma), noise() * sigmas[0], sigmas, solver=solver, flow=sampling is FlowCONST
    )
    assert torch.allclose(out, expected, atol=1e-5)


def test_one_level_returns_the_state(nodes: ModuleType):
    guider = guider_of()
    (sampler,) = node(nodes, "SteinDiffSampler").get_sampler("auto")
    out = guider.sample(noise(), ZEROS, sampler, torch.tensor([2.0]), disable_pbar=True)
    assert torch.equal(out, noise() * 2.0)
    assert guider.calls == 0


def test_the_network_has_no_derivatives():
    """The stand-in is of the kind that could not be calibrated by derivatives: Flux, Chroma, HunyuanVideo, LTXV."""
    with torch.inference_mode(False):
        network = comfy.Network(0)
        x = torch.randn(1, *SHAPE, requires_grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            network(x, torch.zeros(1, 7, 3)).sum().backward()


@pytest.mark.parametrize("search", [0, 1])
@pytest.mark.parametrize("sampling", [DiscreteEPS, FlowCONST])
def test_calibrate_load_sample(nodes: ModuleType, sampling: type, search: int, caplog: pytest.LogCaptureFixture):
    """Calibrate under inference mode, load the file, sample: no call more than plain, and a different image."""
    guider = guider_of(sampling)
    with caplog.at_level(logging.INFO):
        calibration, sigmas, summary = calibrate(nodes, guider, search=search, batch=2)
    path = nodes.output / "mine.json"
    assert str(path) in summary
    assert summary in caplog.messages
    assert "evaluations" in summary
    assert guider.room == 2, "ComfyUI is told the batch"
    assert max(guider.model_patcher.model.rows) == 4, "two samples, two conditions"
    seen = comfy.ProgressBar.made[0].seen
    assert len(seen) > 20
    assert seen == sorted(seen)
    assert seen[-1] <= 1000
    assert calibration.conditions["guidance"] == 3.0
    assert calibration.provenance["backward_passes"] == 0
    loader = nodes.NODE_CLASS_MAPPINGS["SteinDiffLoadCalibration"]
    assert loader.INPUT_TYPES()["required"]["file"][0] == ["mine.json"]
    assert loader.IS_CHANGED("mine.json") == path.stat().st_mtime
    (loaded,) = loader().load("mine.json")
    (given,) = node(nodes, "SteinDiffSigmas").get_sigmas(loaded)
    assert torch.equal(given, sigmas)
    guider.calls = 0
    corrected = run(nodes, guider, loaded)
    assert guider.calls == 4
    (plain,) = node(nodes, "SteinDiffSampler").get_sampler("dpmpp-2m")
    assert loaded.solver == DPMSolverMultistep(2)
    assert corrected.isfinite().all()
    if loaded.corrects:
        assert not torch.allclose(corrected, guider.sample(noise(), ZEROS, plain, given, disable_pbar=True), rtol=1e-3)
    other = guider_of(sampling, positive=prompt(-0.8, length=12))
    assert run(nodes, other, loaded).isfinite().all(), "another prompt, of another length, is fine"


def test_states_that_would_crowd_the_network_are_kept_in_main_memory(
    nodes: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    calibration, *_ = calibrate(nodes, guider_of())
    monkeypatch.setattr(sys.modules["steindiff_nodes.nodes"], "STATES_ON_DEVICE", 0)
    other, *_ = calibrate(nodes, guider_of(), "other")
    assert other.provenance["device"] == "cpu"
    assert other.steps == calibration.steps


def test_a_single_frame_has_the_bands_of_an_image(nodes: ModuleType):
    calibration, *_ = calibrate(nodes, guider_of(), shape=(4, 1, 8, 8))
    assert calibration.basis.bands == 4 * 8


class TestIdentity:
    @pytest.fixture
    def calibration(self, nodes: ModuleType) -> Any:
        return calibrate(nodes, guider_of())[0]

    @pytest.mark.parametrize("low_memory", [False, True])
    def test_a_lora_is_noticed(self, nodes: ModuleType, calibration: Any, low_memory: bool):
        patcher = Patcher(BaseModel(DiscreteEPS()), low_memory=low_memory).add_lora(1.0)
        with pytest.raises(ValueError, match=r"LoRA\): measured with 0 patched weights, this model has 2.*'check' off"):
            run(nodes, CFGGuider(patcher), calibration)
        assert run(nodes, CFGGuider(patcher), calibration, check=False).isfinite().all()

    @pytest.mark.parametrize("low_memory", [False, True])
    def test_the_lora_measured_with_is_known_again(self, nodes: ModuleType, low_memory: bool):
        """In whatever mode of memory; another strength or content is another one."""
        model = BaseModel(DiscreteEPS())
        calibration, *_ = calibrate(nodes, CFGGuider(Patcher(model).add_lora(0.8)))
        run(nodes, CFGGuider(Patcher(model, low_memory=low_memory).add_lora(0.8)), calibration)
        for lora in ({"strength": 0.5}, {"strength": 0.8, "seed": 8}):
            patcher = Patcher(model, low_memory=low_memory).add_lora(**lora)
            with pytest.raises(ValueError, match=r"LoRA\): they differ by .* in content or strength"):
                run(nodes, CFGGuider(patcher), calibration)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
    @pytest.mark.parametrize("scale", [1.0, 0.01])
    def test_precision_is_not_another_model(self, nodes: ModuleType, calibration: Any, dtype: Any, scale: float):
        """Eight bits at load, with or without a scale kept elsewhere."""
        guider = guider_of()
        for weight in guider.model_patcher.model.parameters():
            weight.data = (weight.data / scale).to(dtype)
            if scale != 1.0:
                guider.model_patcher.model.diffusion_model.first.weight_function = lambda w: scale * w
        run(nodes, guider, calibration)

    def test_eight_bits_are_recognised_in_wider_storage(self, nodes: ModuleType):
        """A file of 8-bit weights is often loaded as 16-bit ones."""
        identity = sys.modules["steindiff_nodes.identity"]
        weight = 0.02 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert identity.numbers(weight.to(dtype))[1] == "float"
            for scale in (1.0, 0.0137):
                rounded = (weight / scale).to(torch.float8_e4m3fn).to(dtype) * scale
                assert identity.numbers(rounded)[1] == "8 bit"

    def test_packed_weights_are_compared_with_packed_ones(self, nodes: ModuleType):
        class Packed(Tensor):
            def dequantize(self) -> Tensor:
                raise NotImplementedError

        identity = sys.modules["steindiff_nodes.identity"]
        a, b = ((torch.arange(64) * k % 251).to(torch.uint8).as_subclass(Packed) for k in (7, 11))
        assert identity.numbers(a)[1] == "packed"
        records = [
            {
                "sampling": [],
                "network": {"class": "N", "weights": identity.numbers(w)[0].tolist(), "stored": "packed"},
                "patches": {"count": 0, "content": []},
                "wrappers": [],
                "guidance": [],
            }
            for w in (a, a, b)
        ]
        assert identity.differences(records[0], records[1]) == []
        assert "weights differ" in identity.differences(records[0], records[2])[0]
        records[1]["network"]["stored"] = "float"
        assert identity.differences(records[0], records[1]) == [
            "network: measured with packed weights, these are float"
        ]

    def test_another_network_or_sampling_is_refused(self, nodes: ModuleType, calibration: Any):
        with pytest.raises(ValueError, match="network: its weights differ by"):
            run(nodes, guider_of(seed=1), calibration)
        with pytest.raises(ValueError, match=r"model sampling: measured with \['EPS'\], this model has \['CONST'\]"):
            run(nodes, guider_of(FlowCONST), calibration)

    def test_a_cache_around_the_model_is_noticed(self, nodes: ModuleType, calibration: Any):
        guider = guider_of()
        wrappers = {"predict_noise": {"cache": [len]}, "outer_sample": {None: []}}
        guider.model_patcher.model_options["transformer_options"]["wrappers"] = wrappers
        with pytest.raises(
            ValueError, match=r"wrappers: measured with \[\], this model has \['predict_noise: cache'\]"
        ):
            run(nodes, guider, calibration)

    def test_a_calibration_made_elsewhere_needs_the_override(self, nodes: ModuleType):
        calibration = random_calibration(Karras()(EDM(0.03, 14.6), 4), DPMSolverMultistep(2), SHAPE)
        with pytest.raises(ValueError, match=r"not measured in ComfyUI and does not say for which model.*'check' off"):
            run(nodes, guider_of(), calibration)
        assert run(nodes, guider_of(), calibration, check=False).isfinite().all()


class TestGuidance:
    """Looked at by what the guider makes of known answers: no call of the network, whatever the prompt."""

    def measured(self, nodes: ModuleType, guider: CFGGuider) -> Any:
        return calibrate(nodes, guider)[0]

    def patcher(self, **options: Any) -> Patcher:
        patcher = Patcher(BaseModel(DiscreteEPS()))
        patcher.model_options |= options
        return patcher

    def refused(self, nodes: ModuleType, guider: CFGGuider, calibration: Any) -> None:
        with pytest.raises(ValueError, match=r"guidance: predictions are combined differently, by .*%"):
            run(nodes, guider, calibration)
        assert guider.calls == 0
        assert guider.model_patcher.model.rows == [], "no call of the network"

    def test_weight(self, nodes: ModuleType):
        calibration = self.measured(nodes, guider_of())
        with pytest.raises(ValueError, match=r"fit: guidance: measured with 3\.0, asked for 7\.0\. Calibrate"):
            run(nodes, guider_of(cfg=7.0), calibration)

    def test_two_weights(self, nodes: ModuleType):
        calibration = self.measured(nodes, DualCFGGuider(self.patcher(), 3.0, 2.0))
        run(nodes, DualCFGGuider(self.patcher(), 3.0, 2.0), calibration)
        self.refused(nodes, DualCFGGuider(self.patcher(), 3.0, 4.0), calibration)
        self.refused(nodes, DualCFGGuider(self.patcher(), 2.0, 3.0), calibration)

    def test_rescaling(self, nodes: ModuleType):
        calibration = self.measured(nodes, guider_of())
        self.refused(nodes, CFGGuider(self.patcher(sampler_cfg_function=comfy.rescaled(0.7))), calibration)
        calibration, *_ = calibrate(
            nodes, CFGGuider(self.patcher(sampler_cfg_function=comfy.rescaled(0.7))), "rescaled"
        )
        run(nodes, CFGGuider(self.patcher(sampler_cfg_function=comfy.rescaled(0.7))), calibration)
        self.refused(nodes, CFGGuider(self.patcher(sampler_cfg_function=comfy.rescaled(0.5))), calibration)

    def test_guidance_the_network_is_given(self, nodes: ModuleType):
        def flux(guidance: float, text: float) -> CFGGuider:
            return guider_of(FlowCONST, cfg=1.0, positive=prompt(text, guidance=guidance))

        calibration = self.measured(nodes, flux(3.5, 0.4))
        run(nodes, flux(3.5, -0.2), calibration)
        self.refused(nodes, flux(4.5, 0.4), calibration)

    def test_perturbed_attention(self, nodes: ModuleType):
        def guider(scale: float) -> CFGGuider:
            return CFGGuider(self.patcher(sampler_post_cfg_function=[comfy.perturbed(scale)]))

        calibration = self.measured(nodes, guider(3.0))
        run(nodes, guider(3.0), calibration)
        self.refused(nodes, guider(2.0), calibration)
        self.refused(nodes, guider_of(), calibration)

    def test_a_guider_that_cannot_do_without_its_network(self, nodes: ModuleType, caplog: pytest.LogCaptureFixture):
        """Said, and then only the weight is compared."""

        def needs(guider: CFGGuider, d: Tensor, *_: Any) -> Tensor:
            if "apply_model" in vars(guider.inner_model):
                raise TypeError("no attention map")
            return d

        calibration = self.measured(nodes, CFGGuider(self.patcher(sampler_post_cfg_function=[needs])))
        assert "guidance cannot be compared beyond its weight (TypeError: no attention map)" in caplog.text
        run(nodes, CFGGuider(self.patcher(sampler_post_cfg_function=[needs])), calibration)
        with pytest.raises(ValueError, match=r"guidance: measured with 3\.0"):
            run(nodes, CFGGuider(self.patcher(sampler_post_cfg_function=[needs]), 4.0), calibration)


class TestFiles:
    def test_a_file_is_used_again(self, nodes: ModuleType):
        """After a restart too: what was measured is not measured again, and never overwritten unasked."""
        first, *_ = calibrate(nodes, guider_of())
        guider = guider_of()
        again, _, summary = calibrate(nodes, guider)
        assert again == first
        assert guider.calls == 0
        assert "measured before" in summary
        before = (nodes.output / "mine.json").read_bytes()
        for changed, said in (
            ({"evaluations": 5}, "nfe: measured for 4, asked for 5"),
            ({"samples": 6}, "samples: measured on seeds \\[1000000, 4\\]"),
            ({"search": 1}, "search: measured with another number of rounds"),
            ({"solver": "ddim"}, "solver: measured with"),
            ({"guider": guider_of(cfg=5.0)}, r"guidance: measured with 3\.0, asked for 5\.0"),
        ):
            with pytest.raises(ValueError, match=rf"mine\.json exists and was measured otherwise: {said}"):
                calibrate(nodes, changed.pop("guider", guider), **changed)
        assert (nodes.output / "mine.json").read_bytes() == before
        calibrate(nodes, guider, evaluations=5, existing="overwrite")
        assert (nodes.output / "mine.json").read_bytes() != before

    @pytest.mark.parametrize(
        "name",
        ["", "..", ".", "../mine", "a/b", "a\\b", "con", "CON.x", "con?:*", "a" * 300, "a\0b", ".hidden", "x.", "x "],
    )
    def test_bad_names_are_refused_before_anything_runs(self, nodes: ModuleType, name: str):
        cls = nodes.NODE_CLASS_MAPPINGS["SteinDiffCalibrate"]
        assert str(cls.VALIDATE_INPUTS(name)).startswith("name must be a file name")
        guider = guider_of()
        with pytest.raises(ValueError, match="name must be a file name"):
            calibrate(nodes, guider, name)
        assert guider.calls == 0

    @pytest.mark.parametrize("name", ["c.json", "flux dev 8", "größe-1.5_(v2)"])
    def test_good_names(self, nodes: ModuleType, name: str):
        cls = nodes.NODE_CLASS_MAPPINGS["SteinDiffCalibrate"]
        assert cls.VALIDATE_INPUTS(name) is True
        assert sys.modules["steindiff_nodes.nodes"].target(name).name == f"{name.removesuffix('.json')}.json"

    @pytest.mark.parametrize("file", ["../mine.json", "/etc/hostname", "a\0b", "absent.json", "a" * 5000])
    def test_only_registered_files_are_looked_at(
        self, nodes: ModuleType, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        (tmp_path / "output").mkdir()
        (tmp_path / "output" / "mine.json").write_text("{}")
        loader = nodes.NODE_CLASS_MAPPINGS["SteinDiffLoadCalibration"]
        assert math.isnan(loader.IS_CHANGED(file))
        with pytest.raises(ValueError, match="file must be one of output/steindiff or models/steindiff"):
            loader().load(file)

    def test_files_in_models_are_listed_too(self, nodes: ModuleType, tmp_path: Path):
        calibration, *_ = calibrate(nodes, guider_of())
        calibration.save(tmp_path / "models" / "steindiff" / "sdxl" / "shared.json")
        loader = nodes.NODE_CLASS_MAPPINGS["SteinDiffLoadCalibration"]
        assert loader.INPUT_TYPES()["required"]["file"][0] == ["mine.json", "sdxl/shared.json"]
        assert loader().load("sdxl/shared.json")[0] == calibration


class TestInterruption:
    def test_in_the_search_keeps_the_best(self, nodes: ModuleType, caplog: pytest.LogCaptureFixture):
        guider = guider_of()
        nodes.button.after = 4 * (24 + 4 * 8)
        with caplog.at_level(logging.INFO), pytest.raises(comfy.InterruptProcessingException):
            calibrate(nodes, guider, search=4)
        assert f"wrote {nodes.output / 'mine.json'}" in caplog.text
        (loaded,) = node(nodes, "SteinDiffLoadCalibration").load("mine.json")
        assert loaded.provenance["stopped"]

    def test_before_it_leaves_nothing(self, nodes: ModuleType):
        nodes.button.after = 30
        with pytest.raises(comfy.InterruptProcessingException):
            calibrate(nodes, guider_of())
        assert not nodes.output.exists()


def test_misuse_is_refused(nodes: ModuleType):
    guider = guider_of()
    calibration, sigmas, _ = calibrate(nodes, guider)
    with pytest.raises(ValueError, match=r"solver: measured with .*; set solver to auto"):
        node(nodes, "SteinDiffSampler").get_sampler("ddim", calibration)
    assert set(SOLVERS) < set(node(nodes, "SteinDiffSampler").INPUT_TYPES()["required"]["solver"][0])
    with pytest.raises(ValueError, match=r"sigmas: 3 steps, but the calibration is for its own 4; connect SteinDiff S"):
        run(nodes, guider, calibration, sigmas[1:])
    (sampler,) = node(nodes, "SteinDiffSampler").get_sampler("auto", calibration)
    with pytest.raises(ValueError, match=r"shape: measured for \(4, 8, 8\), asked for \(4, 16, 16\)"):
        guider.sample(noise((4, 16, 16)), torch.zeros(2, 4, 16, 16), sampler, sigmas, disable_pbar=True)


def test_heun_with_an_even_budget_fails_before_a_model_is_loaded(nodes: ModuleType):
    guider = guider_of()
    with pytest.raises(ValueError, match=r"nfe must be one Heun\(\) can spend exactly, got 8; choose 7 or 9"):
        calibrate(nodes, guider, solver="heun", evaluations=8)
    assert not hasattr(guider, "room")
