# SPDX-License-Identifier: Apache-2.0
"""Parts shared by all families: parallel sizes and coordinates, rules, and holders' layouts that follow from rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from conversion.boxes import Layout, Piece, Slot, SlotLayout
from conversion.cuts import WHOLE, AxisRank, Cut, Cutout, Experts
from conversion.families.settings import HfConfig

Flavour = Literal["local", "te"]
"""Megatron's layer specs: of plain torch modules, or of Transformer Engine's."""

MTP = "mtp."
"""Prefix of names in the live Megatron model and in checkpoints: layers of multi-token prediction."""
DRAFTER = "drafter."
"""Prefix of names in a live engine: weights of the drafter, vLLM's second model, which proposes tokens."""


@dataclass(frozen=True, slots=True)
class MegatronCoords:
    """Coordinates of a rank: dense layers are cut by (tp, pp), experts by (etp, ep, pp)."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True, slots=True)
class MegatronParallel:
    """Parallel sizes of the trainer, and how layers go to pipeline stages."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    vpp: int = 1
    """Virtual pipeline chunks of each stage, interleaved over the stages."""

    def coords_of(self, rank: int, world_size: int) -> MegatronCoords:
        """A global rank's coordinates in Megatron's default order tp-cp-dp-pp (experts etp-ep-dp-pp), fastest first."""
        for sizes, names in (((self.tp, self.cp, self.pp), "tp*cp*pp"), ((self.etp, self.ep, self.pp), "etp*ep*pp")):
            product = sizes[0] * sizes[1] * sizes[2]
            if world_size % product:
                raise ValueError(
                    f"{names}={product} does not divide the world size {world_size}; use parallel sizes whose "
                    "product divides it"
                )
        return MegatronCoords(
            tp=rank % self.tp, pp=rank // (world_size // self.pp), ep=rank // self.etp % self.ep, etp=rank % self.etp
        )

    def layers_of(self, pp_rank: int, num_layers: int, chunk: int = 0) -> range:
        """Global indices of the layers of a chunk of a stage; without virtual stages, of the whole stage."""
        ends = ((0, self.num_layers_in_first_pipeline_stage), (self.pp - 1, self.num_layers_in_last_pipeline_stage))
        given = {stage: size for stage, size in ends if size is not None}
        rest, num_even = num_layers - sum(given.values()), self.pp - len(given)
        if rest < 0 or (rest % num_even if num_even else rest):
            raise ValueError(
                f"pipeline_model_parallel_size={self.pp} with first stage "
                f"{self.num_layers_in_first_pipeline_stage} and last stage "
                f"{self.num_layers_in_last_pipeline_stage} leaves {rest} of {num_layers} layers for {num_even} "
                "equal stages; set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage so that "
                "the rest divides"
            )
        sizes = [given.get(stage, rest // max(num_even, 1)) for stage in range(self.pp)]
        setting = f"virtual_pipeline_model_parallel_size={self.vpp}"
        if self.vpp > 1 and self.pp == 1:
            # Megatron would build every layer in every chunk.
            raise ValueError(f"{setting}: needs pipeline_model_parallel_size of at least 2; leave it out")
        if (
            self.vpp > 1
            and self.num_layers_in_first_pipeline_stage
            and self.num_layers_in_last_pipeline_stage
            and self.pp == 2
        ):
            # Megatron divides by the number of stages between them.
            raise ValueError(
                f"{setting}: with both stages' layers given, Megatron needs a third stage; give one of them"
            )
        if any(size % self.vpp for size in sizes):
            raise ValueError(f"{setting}: does not divide the layers of each stage {sizes}; use a common divisor")
        start = (chunk * num_layers + sum(sizes[:pp_rank])) // self.vpp
        return range(start, start + sizes[pp_rank] // self.vpp)


@dataclass(frozen=True, slots=True)
class VllmParallel:
    """Parallel sizes of an engine. `ep` is 1 (experts cut by tp) or a multiple of tp (workers hold whole experts).

    An ep of several tp makes as many groups of workers: each holds everything else over tp, and all spread the experts
    over ep.
    """

    tp: int = 1
    ep: int = 1
    has_drafter: bool = False
    """True if the engine proposes tokens with the model's own MTP layers, cut as the model is."""
    pp: int = 1
    """Pipeline stages, with one group only. Worker `i` is worker `i % tp` of stage, or of group, `i // tp`."""

    def __post_init__(self) -> None:
        if self.ep > 1 and self.ep % self.tp:
            raise ValueError(
                f"vllm_cfg.expert_parallel_size={self.ep} must be 1 or a multiple of tensor_parallel_size={self.tp}"
            )
        if self.num_groups > 1 and self.pp > 1:
            raise ValueError(
                f"vllm_cfg.expert_parallel_size={self.ep} must be at most tensor_parallel_size={self.tp} with "
                "pipeline stages"
            )

    @property
    def num_groups(self) -> int:
        """Number of groups of workers that sample requests of their own."""
        return max(1, self.ep // self.tp)

    @property
    def num_workers(self) -> int:
        """Number of workers of an engine."""
        return self.tp * self.pp * self.num_groups

    def layers_of(self, stage: int, num_layers: int) -> range:
        """Layer indices of a stage, as `get_pp_indices` of vllm/distributed/utils.py: leftovers to the last but one."""
        even, rest = divmod(num_layers, self.pp)
        sizes = [even + (self.pp - 1 - rest <= index < self.pp - 1) for index in range(self.pp)]
        return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))


EngineDtypes = tuple[tuple[str, str], ...]
"""Name and dtype of tensors in the live model of an engine worker."""

_CASTABLE = ("float64", "float32", "bfloat16", "float16")
_VLLM_LAYERS = "model.layers.{layer}."


@dataclass(frozen=True)
class Rule:
    """Mapping from canonical tensors to one tensor of each holder, with each holder's name for it.

    Names are relative to the layer; "{expert}" stands for the local index of an expert.
    """

    cut: Cut | Experts
    megatron: str
    """Name under Transformer Engine's specs; also the key in checkpoints, unless `checkpoint` names another.

    Empty where Megatron holds the tensor in that of another rule.
    """
    vllm: str = ""
    """Empty where vLLM holds the tensor in that of another rule."""
    vllm_cut: Cut | None = None
    """Cut of vLLM's tensor, where it holds more than Megatron's."""
    local: str | None = None
    """Name under the local specs, where it differs."""
    checkpoint: str | None = None
    dtype: str | None = None
    """Dtype of the trainer's tensor; None for the model's."""
    is_whole_in_groups: bool = False
    """True if vLLM's class does not cut it where several groups share experts: it parts the tokens there instead."""


@dataclass(frozen=True)
class Model:
    """A model as rules: of the first stage (embedding), of each layer, and of the last stage (final norm, output)."""

    first: tuple[Rule, ...]
    layers: tuple[tuple[Rule, ...], ...]
    last: tuple[Rule, ...]
    tied_output: Rule | None = None
    """Copy of the tied embedding on the last of several stages. Other holders have the embedding only."""
    mtp: tuple[Rule, ...] = ()
    """Layers of multi-token prediction, on the last stage. Names are whole: `megatron` begins with `MTP`, `vllm` with
    `DRAFTER`.
    """

    def all(self) -> Iterator[tuple[int | None, Rule]]:
        """Every rule with the index of its layer, None outside of the layers."""
        yield from ((None, rule) for rule in self.first)
        yield from ((index, rule) for index, rules in enumerate(self.layers) for rule in rules)
        yield from ((None, rule) for rule in (*self.last, *self.mtp))

    def stage(self, parallel: MegatronParallel, pp_rank: int) -> Iterator[tuple[int, int | None, Rule]]:
        """Every rule of a pipeline stage with its chunk and the local index of its layer."""
        if pp_rank == 0:
            yield from ((0, None, rule) for rule in self.first)
        for chunk in range(parallel.vpp):
            for local_index, index in enumerate(parallel.layers_of(pp_rank, len(self.layers), chunk)):
                yield from ((chunk, local_index, rule) for rule in self.layers[index])
        if pp_rank == parallel.pp - 1:
            yield from ((parallel.vpp - 1, None, rule) for rule in (*self.last, *self.mtp))
            if parallel.pp > 1 and self.tied_output is not None:
                yield parallel.vpp - 1, None, self.tied_output

    def engine_stage(
        self, parallel: VllmParallel, stage: int, *, has_ends: bool, num_at_end: int = 0
    ) -> Iterator[tuple[int | None, Rule]]:
        """Every rule of an engine's stage with the index of its layer; with `has_ends`, both ends are on all stages."""
        is_first, is_last = stage == 0, stage == parallel.pp - 1
        if is_first or has_ends or (is_last and self.tied_output is not None):
            yield from ((None, rule) for rule in self.first)
        yield from (
            (index, rule) for index in parallel.layers_of(stage, len(self.layers)) for rule in self.layers[index]
        )
        if is_last or has_ends:
            yield from ((None, rule) for rule in self.last[0 if is_last else num_at_end :])
        if is_last and parallel.has_drafter:
            yield from ((None, rule) for rule in self.mtp)


@dataclass(frozen=True)
class Family:
    """All that is known of one Hugging Face model_type. Methods raise ValueError for configs they cannot convert."""

    model: Callable[[HfConfig, int | None], Model]
    """Rules of a config; the second argument is the padded vocabulary size of a checkpoint."""
    megatron_arguments: Callable[[HfConfig], dict[str, dict[str, object]]]
    """Arguments derived from config.json, as plain values: "transformer" for TransformerConfig, "model" for the model
    class. A GPTModel also has "attributes", which Megatron reads of a TransformerConfig that has no such fields. "mtp"
    of a model with MTP layers has the letters of the layers of each step ("pattern"), and the number of steps
    ("num_steps")."""
    model_class: Literal["mamba", "gpt"]
    """MambaModel or GPTModel."""
    has_ends_everywhere: bool = False
    """True if vLLM builds embedding, final norm and output on every stage of an engine, whether that computes with them
    or not.
    """
    num_at_end: int = 0
    """Number of rules, of final norm and output, that it builds on the last stage alone, even so."""
    stated: tuple[tuple[str, object], ...] = ()
    """Keys and values that config.json must state for engines: where they are missing, vLLM takes other values."""
    vllm_reads_stacked_experts: bool = True
    has_transposed_experts: bool = False
    """True if files have a layer's experts in one tensor with inputs before outputs, or in MXFP4."""
    leaves_out_mtp: bool = False
    """True if published files may have layers of multi-token prediction behind the others, which nothing here reads."""
    left_out: str = ""
    """First letters of the names of such layers, where they stand apart."""
    held_otherwise: str = ""
    """Weights that Megatron-LM and Megatron-Bridge hold in another form, in words; empty: none."""

    def is_left_out(self, hf_config: HfConfig, name: str) -> bool:
        """True if a stored tensor belongs to a layer behind the last, which `num_nextn_predict_layers` counts."""
        if self.left_out and name.startswith(self.left_out):
            return True
        steps, last = hf_config.get("num_nextn_predict_layers") or 0, hf_config.get("num_hidden_layers") or 0
        if not self.leaves_out_mtp or not isinstance(steps, int) or not isinstance(last, int):
            return False
        layer = name.removeprefix("model.layers.").partition(".")[0] if name.startswith("model.layers.") else ""
        return layer.isdecimal() and last <= int(layer) < last + steps

    def canonical(self, hf_config: HfConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the Hugging Face checkpoint."""
        return {
            tensor.name: tensor.shape for _, rule in self.model(hf_config, None).all() for tensor in rule.cut.tensors
        }

    def mtp(self, hf_config: HfConfig) -> frozenset[str]:
        """Names of the MTP layers' tensors in the Hugging Face checkpoint."""
        return frozenset(tensor.name for rule in self.model(hf_config, None).mtp for tensor in rule.cut.tensors)

    def float32_tensors(self, hf_config: HfConfig) -> frozenset[str]:
        """Names of the tensors that every holder keeps in float32, whatever the dtype of the model."""
        return frozenset(
            tensor.name
            for _, rule in self.model(hf_config, None).all()
            if rule.dtype == "float32"
            for tensor in rule.cut.tensors
        )

    def expert_layers(self, hf_config: HfConfig) -> tuple[int, ...]:
        """Indices of the layers that choose experts for each token, ascending; empty for a model without experts."""
        layers = self.model(hf_config, None).layers
        return tuple(
            index for index, rules in enumerate(layers) if any(isinstance(rule.cut, Experts) for rule in rules)
        )

    def megatron_layout(
        self,
        hf_config: HfConfig,
        parallel: MegatronParallel,
        coords: MegatronCoords,
        dtype: str,
        flavour: Flavour = "local",
    ) -> Layout:
        """Each parameter and persistent buffer of a rank's live model, by chunk and name (layers counted per chunk)."""
        return _megatron_layout(self, _key(hf_config), parallel, coords, dtype, flavour)

    def vllm_layout(
        self, hf_config: HfConfig, parallel: VllmParallel, worker: int, dtype: str, live: EngineDtypes = ()
    ) -> Layout:
        """Every parameter and persistent buffer of one worker of an engine.

        vLLM chooses the dtype of some tensors by the GPU on which it runs. `live` has the dtypes of the worker's live
        model; tensors that it does not name have `dtype`.
        """
        return _vllm_layout(self, _key(hf_config), parallel, worker, dtype, live)

    def torch_dist_layout(
        self, hf_config: HfConfig, dtype: str, padded_vocabulary: int | None = None, *, stacked_layers: bool = False
    ) -> Layout:
        """Global tensors of a Megatron torch_dist checkpoint, by key. Names are those of Transformer Engine's specs.

        Each layer has keys of its own, as Megatron writes with the metadata non_homogeneous_layers. With
        `stacked_layers`, as it writes without: the equal layers of a GPTModel are one tensor [layers, ...] each. The
        vocabulary is padded to `padded_vocabulary` rows, by default as Megatron does at tp 1; sizes in checkpoints
        depend on the tp that wrote them.
        """
        return _torch_dist_layout(
            self, _key(hf_config), dtype, padded_vocabulary, stacked_layers and self.model_class == "gpt"
        )


def read_by_engines(layout: Layout, parallel: VllmParallel) -> Layout:
    """The part of a Megatron rank that engines read: MTP layers only where a drafter computes with them."""
    if parallel.has_drafter:
        return layout
    return {slot: content for slot, content in layout.items() if not slot.name.startswith(MTP)}


# Enough for the ranks of a large run; beyond it, equal coordinates get equal layouts in different objects.
_NUM_LAYOUTS = 1024


def _key(hf_config: HfConfig) -> str:
    return json.dumps(hf_config, sort_keys=True)


@lru_cache(maxsize=16)
def _model(family: Family, config_key: str, padded_vocabulary: int | None = None) -> Model:
    return family.model(json.loads(config_key), padded_vocabulary)


@lru_cache(maxsize=_NUM_LAYOUTS)
def _megatron_layout(
    family: Family, config_key: str, parallel: MegatronParallel, coords: MegatronCoords, dtype: str, flavour: Flavour
) -> Layout:
    if parallel.vpp > 1 and family.model_class == "mamba":
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={parallel.vpp}: Megatron's hybrid models have no virtual "
            "stages; leave it out"
        )
    dense, experts = AxisRank(parallel.tp, coords.tp), AxisRank(parallel.etp, coords.etp, "expert_tensor_parallel_size")
    placement = AxisRank(parallel.ep, coords.ep, "expert_model_parallel_size")
    layout: Layout = {}
    for chunk, layer, rule in _model(family, config_key).stage(parallel, coords.pp):
        if not rule.megatron:
            continue
        cut, local_name = rule.cut, rule.local if flavour == "local" and rule.local else rule.megatron
        name = _name("decoder.layers.{layer}.", layer, local_name)
        if isinstance(cut, Experts):
            for index, cutout in enumerate(cut.megatron(placement, experts)):
                layout[Slot(name.replace("{expert}", str(index)), chunk)] = _slot(cutout, rule.dtype or dtype)
        else:
            layout[Slot(name, chunk)] = _slot(cut.megatron(dense), rule.dtype or dtype)
    return layout


@lru_cache(maxsize=_NUM_LAYOUTS)
def _vllm_layout(
    family: Family, config_key: str, parallel: VllmParallel, worker: int, dtype: str, live: EngineDtypes
) -> Layout:
    group, of_group = divmod(worker, parallel.tp)
    stage = group if parallel.pp > 1 else 0
    dense = AxisRank(parallel.tp, of_group, "vllm_cfg.tensor_parallel_size")
    experts = dense if parallel.ep == 1 else AxisRank(1, 0)
    placement = AxisRank(parallel.ep, worker % parallel.ep, "vllm_cfg.expert_parallel_size")
    for name, found in live:
        if found not in _CASTABLE:
            raise ValueError(
                f"{name} is {found} in the engine, to which a refit casts no weights; use an engine without "
                "quantisation"
            )
    dtypes = dict(live)
    layout: Layout = {}
    model = _model(family, config_key)
    if parallel.has_drafter and not model.mtp:
        raise ValueError(
            "config.json: num_nextn_predict_layers: the model has no MTP layers to propose tokens with; use method "
            "ngram"
        )
    for layer, rule in model.engine_stage(
        parallel, stage, has_ends=family.has_ends_everywhere, num_at_end=family.num_at_end
    ):
        shard, cut = WHOLE if parallel.num_groups > 1 and rule.is_whole_in_groups else dense, rule.vllm_cut or rule.cut
        if not rule.vllm:
            continue
        cutout = cut.vllm(placement, experts) if isinstance(cut, Experts) else cut.vllm(shard)
        name = _name(_VLLM_LAYERS, layer, rule.vllm)
        layout[Slot(name)] = _slot(cutout, dtypes.get(name, dtype))
    return layout


@lru_cache(maxsize=16)
def _torch_dist_layout(
    family: Family, config_key: str, dtype: str, padded_vocabulary: int | None, stacked_layers: bool
) -> Layout:
    model = _model(family, config_key, padded_vocabulary)
    if stacked_layers and len({tuple(rule.megatron for rule in rules) for rules in model.layers}) == 1:
        return _stacked_layers(model, dtype)
    layout: Layout = {}
    for layer, rule in model.all():
        for suffix, cutout in rule.cut.checkpoint().items() if rule.megatron else ():
            layout[Slot(_name("decoder.layers.{layer}.", layer, rule.checkpoint or rule.megatron) + suffix)] = _slot(
                cutout, rule.dtype or dtype
            )
    return layout


def _stacked_layers(model: Model, dtype: str) -> Layout:
    layout: Layout = {}
    for rule in (*model.first, *model.last, *model.mtp):
        layout[Slot(rule.checkpoint or rule.megatron)] = _slot(rule.cut.checkpoint()[""], rule.dtype or dtype)
    for rules in zip(*model.layers, strict=True):
        key, num_layers = rules[0].checkpoint or rules[0].megatron, len(rules)
        cutouts = [rule.cut.checkpoint()[""] for rule in rules]
        pieces = tuple(
            Piece(piece.name, piece.box, ((layer, layer + 1), *piece.local), piece.transform)
            for layer, cutout in enumerate(cutouts)
            for piece in cutout.pieces
        )
        layout[Slot("decoder.layers." + key)] = SlotLayout(
            (num_layers, *cutouts[0].shape), rules[0].dtype or dtype, pieces
        )
    return layout


def _name(layer_prefix: str, layer: int | None, name: str) -> str:
    return name if layer is None else layer_prefix.replace("{layer}", str(layer)) + name


def _slot(cutout: Cutout, dtype: str) -> SlotLayout:
    return SlotLayout(cutout.shape, dtype, cutout.pieces, cutout.padding)
