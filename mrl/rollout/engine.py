# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine driven step by step: requests in, finished rollouts out, refits and aborts between two steps."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

import numpy as np
from vllm import CompletionOutput, LLMEngine, RequestOutput
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from conversion.adapters import HeldAdapters
from conversion.boxes import Slot
from conversion.families.common import EngineDtypes
from conversion.families.registry import family
from conversion.files.hf_folder import read_config
from mrl import phases
from mrl.config.schema.generation import GenerationConfig
from mrl.gpus import on_gpu
from mrl.phases import Phase
from mrl.refit import Refused
from mrl.refit.inputs import Part, WorkerRefit
from mrl.refit.pull import VerifyReport
from mrl.rollout.callers import Callers
from mrl.rollout.concurrency import Concurrency
from mrl.rollout.engine_arguments import engine_arguments
from mrl.rollout.environment import EngineNodes, drop_names_of_shared_memory
from mrl.rollout.groups import GroupScheduler, as_one, start_groups
from mrl.rollout.held_adapters import adapter_request
from mrl.rollout.requests import rollout_of, sampling_params, unfinished_rollout
from mrl.spans import memory_facts, process_key
from mrl.types import Rollout, RolloutRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Unfinished:
    """A request inside vLLM."""

    request: RolloutRequest
    vllm_id: str
    weight_version: int | None
    """Version of the engine when the request came."""
    num_refits: int
    """Number of refits that the engine had had by then."""


class Engine:
    """One engine: all workers, and the scheduler. Samples only between a completed refit and the next one.

    `weight_version` is None until the first refit is complete. `num_steps` counts since the start.
    `llm` is vLLM's engine.
    """

    def __init__(
        self,
        model_dir: str,
        config: GenerationConfig,
        *,
        seed: int,
        worker_timeout_s: float,
        device_ids: Sequence[int] = (),
        keeps_routes: bool = False,
        keeps_kv_cache: bool = False,
        tokenizer: str | None = None,
        num_tokens: int = 0,
        nodes: EngineNodes | None = None,
        adapters: HeldAdapters | None = None,
    ) -> None:
        """Starts the engine with the weights of `model_dir`, read by vLLM's own loader; see `engine_arguments`.

        A call of its workers (all that moves, compares or lists weights) hangs when it takes longer than
        `worker_timeout_s`. With `keeps_routes` its rollouts tell which experts their tokens went through. With
        `keeps_kv_cache` requests that a new weight version finds running go on with the keys, values and states of the
        old one; else they compute them anew. `tokenizer` is the folder of the tokenizer in whose text stop strings are
        looked for, if requests have any; `callers` ask in its text, too. Only the first `num_tokens` tokens are drawn;
        0: all of the model's. With `nodes`, `run_part` starts the workers on the others. `adapters` come in refits of
        their own, and every request is computed with them.
        """
        if current_platform.is_cpu() == on_gpu():
            device = "a GPU" if on_gpu() else "the CPU"
            raise RuntimeError(
                f"this engine is to sample on {device}, as cluster.gpus_per_node says, but vLLM's platform is "
                f"{current_platform.device_name!r}; python -m mrl.doctor looks at the installation and the driver"
            )
        self._worker_timeout_s = worker_timeout_s
        self._max_model_len = config.vllm_cfg.max_model_len
        self._is_colocated = config.colocated.enabled
        arguments = engine_arguments(
            model_dir,
            config,
            seed=seed,
            device_ids=device_ids,
            keeps_routes=keeps_routes,
            tokenizer=tokenizer,
            nodes=nodes,
            adapters=adapters,
        )
        self.llm = (
            start_groups(arguments) if arguments.data_parallel_size > 1 else LLMEngine.from_engine_args(arguments)
        )
        if num_tokens:
            self._workers("limit_vocabulary", num_tokens)
        scheduler = self._core.scheduler
        schedulers = scheduler.schedulers if isinstance(scheduler, GroupScheduler) else [scheduler]
        is_bounded = config.vllm_cfg.adaptive_concurrency
        self.concurrency = [Concurrency(cast(Scheduler, one), is_bounded=is_bounded) for one in schedulers]
        self._adapter = None if adapters is None else adapter_request()
        if adapters is not None:
            self._workers("hold_adapter")
        self._keeps_kv_cache = keeps_kv_cache
        self.callers = Callers(config.vllm_cfg.num_http_slots)
        """Requests of other threads, which steps take in and answer together with the rollouts."""
        self._unfinished: dict[str, _Unfinished] = {}
        self._finished: list[Rollout] = []
        self._expert_layers: list[int] | None = None
        if keeps_routes:
            hf_config = read_config(Path(model_dir) / "config.json")
            self._expert_layers = list(family(hf_config).expert_layers(hf_config))
            if current_platform.is_cpu():
                self._workers("record_routes", self._expert_layers)
        self.phase: Phase | None = None
        """The phase that the engine has entered last; None of a dedicated one, and before the first."""
        self._awake = {"weights", "kv_cache"}
        self._is_refitting = False
        self._verified: dict[Part, bool] = {}
        """Parts that refits move, and whether a refit has verified each for the next version."""
        self._num_refits = 0
        self.weight_version: int | None = None
        self.num_steps = 0

    @property
    def _core(self) -> EngineCore:
        assert isinstance(self.llm.engine_core, InprocClient)
        return self.llm.engine_core.engine_core

    @property
    def num_drawn(self) -> int:
        """Tokens drawn since the start, also for callers and of requests that were aborted."""
        return sum(one.num_drawn for one in self.concurrency)

    @property
    def num_recomputed(self) -> int:
        """Tokens computed again since the start, whose cache was given to other requests."""
        return sum(one.num_recomputed for one in self.concurrency)

    @property
    def num_unfinished(self) -> int:
        """Number of rollouts that later steps return."""
        return len(self._unfinished) + len(self._finished)

    @property
    def can_sample(self) -> bool:
        """True with known-version weights and the KV cache: not before or in a first refit, or while memory is lent."""
        return self.weight_version is not None and not self._is_refitting and self.phase in (None, "generate")

    def add(self, requests: Sequence[RolloutRequest]) -> None:
        """Queues requests; they are sampled by later steps."""
        twice = {request.request_id for request in requests} & self._unfinished.keys()
        if twice or len({request.request_id for request in requests}) < len(requests):
            raise ValueError(
                f"requests were added twice: {sorted(twice) or 'within one call'}; a request id may be unfinished "
                "only once"
            )
        parameters = [sampling_params(request, max_model_len=self._max_model_len) for request in requests]
        for request, params in zip(requests, parameters, strict=True):
            prompt = tokens_input(request.context_ids, cache_salt=self._cache_salt)
            vllm_id = self.llm.add_request(request.request_id, prompt, params, lora_request=self._adapter)
            self._unfinished[request.request_id] = _Unfinished(request, vllm_id, self.weight_version, self._num_refits)

    def step(self) -> list[Rollout]:
        """Starts a forward pass over the running requests and returns finished rollouts. Callers get their answers.

        On GPUs vLLM prepares a pass while the workers compute the one before, whose result a step then returns.
        """
        if self.weight_version is None or self._is_refitting:
            state = "is being refitted" if self._is_refitting else "has not been refitted yet"
            raise RuntimeError(f"the engine {state}: it must not sample before set_weight_version")
        self._take_questions(self.weight_version)
        self._advance(self.weight_version)
        self.num_steps += 1
        finished, self._finished = self._finished, []
        return finished

    def _advance(self, weight_version: int) -> None:
        """Runs one vLLM step, and keeps finished rollouts for `step`."""
        answers = []
        for answer in self.llm.step():
            assert isinstance(answer, RequestOutput) and answer.finished
            if not self.callers.answer(answer, num_refits=self._num_refits, take_routes=self._routes_of_question):
                answers.append(answer)
        ended = [self._unfinished.pop(answer.request_id) for answer in answers]
        all_routes = self._take_routes([one.vllm_id for one in ended], [answer.outputs[0] for answer in answers])
        self._finished += [
            rollout_of(one.request, answer, versions=self._versions(one, weight_version), routes=routes)
            for one, answer, routes in zip(ended, answers, all_routes, strict=True)
        ]

    def _versions(self, one: _Unfinished, weight_version: int) -> tuple[int, int]:
        """Version of the weights that an unfinished request began with, and the number of versions since."""
        if one.weight_version is None:
            return weight_version, self._num_refits - one.num_refits
        return one.weight_version, self._num_refits - one.num_refits + 1

    def unfinished(self) -> list[Rollout]:
        """Rollouts that no step has returned, as far as they are sampled, unfinished ones with finish reason `abort`.

        Not those with stop strings: vLLM would overlook one that lies across the place where the rollout goes on.
        """
        if self.weight_version is None:
            return []
        found, states = list(self._finished), self.llm.output_processor.request_states
        for one in self._unfinished.values():
            state = states.get(one.vllm_id)
            if state is not None and not one.request.sampling.stop_strings:
                versions = self._versions(one, self.weight_version)
                found += unfinished_rollout(one.request, state, versions=versions)
        return found

    def settle(self) -> None:
        """Waits for the passes vLLM has begun, and begins none: weights, caches and requests may change only then."""
        core = self._core
        if not core.batch_queue or self.weight_version is None:
            return
        # A paused scheduler has nothing to compute, so that a step takes in a result.
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            self._advance(self.weight_version)
        core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drops requests and their samples. Ignores ids that steps have returned."""
        self.settle()
        self._finished = [rollout for rollout in self._finished if rollout.request.request_id not in request_ids]
        self.llm.abort_request([request_id for request_id in request_ids if self._unfinished.pop(request_id, None)])

    def bind_workers(self, device_ids: Sequence[int]) -> None:
        """Binds each worker to the NUMA node of its GPU. Workers on other nodes have GPUs of the same numbers."""
        logger.info("Workers: %s", "; ".join(self._workers("bind_to_gpu", list(device_ids))))

    def live_digest(self) -> list[dict[Slot, int]]:
        """Per worker: checksum of every parameter and persistent buffer of the live model."""
        return self._workers("live_digest")

    def tensor_dtypes(self, part: Part = "weights") -> list[EngineDtypes]:
        """Per worker: name and dtype of every parameter and persistent buffer of the live model, or of its adapters."""
        return self._workers("tensor_dtypes", part)

    def memory_facts(self) -> dict[str, int]:
        """Host bytes of this process and the workers; on GPUs also what is used of the fullest one, whoever uses it."""
        processes = dict(self._workers("memory_facts"))
        processes.setdefault(process_key(), memory_facts())
        facts = {"engine_host_bytes": sum(found["host_bytes"] for found in processes.values())}
        used = [found["gpu_used_bytes"] for found in processes.values() if "gpu_used_bytes" in found]
        return facts | ({"gpu_used_bytes": max(used)} if used else {})

    def prepare_refit(self, workers: Sequence[WorkerRefit]) -> None:
        """Makes each worker compute its part of the schedule; `workers` are in the order of their ranks."""
        self._workers("prepare_refit", list(workers))
        self._verified.setdefault(workers[0].inputs.part, False)

    def refit(self, attempt: int, is_reader: bool, timeout_s: float, part: Part = "weights") -> list[VerifyReport]:
        """Takes part in a refit attempt with the policy. Per worker: what was verified; nothing if no reader.

        A reader copies all rounds into the live model, compares them with the trainer's checksums as they come, proves
        that every live byte was reached, and refuses to step from here on. A dedicated engine that is no reader only
        lets the exchange go on.

        Raises:
            RefitError: a box differs, or not every live byte was verified; or the attempt came to nothing within
                `timeout_s`. The next one has a higher number.
        """
        if not is_reader:
            self._refit_workers("run_refit", attempt, is_reader, timeout_s, part)
            return []
        self.settle()
        self._is_refitting, self._verified[part] = True, False
        self._refit_workers("wait_for_room", attempt, timeout_s, part)
        self.enter("refit")
        reports = self._refit_workers("run_refit", attempt, is_reader, timeout_s, part)
        self._verified[part] = True
        return reports

    def _refit_workers(self, method: str, *arguments: object) -> list:
        answers = self._workers(method, *arguments)
        for answer in answers:
            if isinstance(answer, Refused):
                raise answer.error
        return answers

    def serve(self, version: int) -> None:
        """Completes a refit, and takes the KV cache for the next samples."""
        self.set_weight_version(version)
        self.enter("generate")

    def set_weight_version(self, version: int) -> None:
        """Completes a refit: from here on the engine samples, from weights of this version.

        Cached keys and values of older weights are dropped, and running requests compute theirs again; see
        `keeps_kv_cache`. An engine that was never prepared for refits takes the weights that it has loaded for this
        version. RuntimeError: what a prepared one holds is not proven by `refit`.
        """
        if not all(self._verified.values()):
            raise RuntimeError(f"weight version {version}: no refit was finished since version {self.weight_version}")
        # What lies below adapters stays verified.
        moving: Part = "adapters" if "adapters" in self._verified else "weights"
        if self._verified:
            self._verified[moving] = False
        self.settle()
        if not (self._keeps_kv_cache and (self._unfinished or self.callers.num_inside)):
            self.llm.reset_prefix_cache(reset_running_requests=True)
        self._is_refitting = False
        self._num_refits += 1
        self.weight_version = version

    def enter(self, phase: Phase) -> None:
        """Frees or takes GPU memory as the phase table says. On CPU hosts and in dedicated engines nothing moves."""
        place = phases.enter(self.phase, phase)
        self.phase = phase
        if current_platform.is_cpu() or not self._is_colocated:
            return
        wanted = {
            tag for tag, where in (("weights", place.engine_weights), ("kv_cache", place.kv_cache)) if where == "device"
        }
        self.settle()
        # Callers get their answers when the cache is back, and rollouts go on.
        mode = "keep" if self.callers.num_inside or self._unfinished else "abort"
        if "weights" in self._awake - wanted:
            # Level 2 drops the values of the weights, which the next refit writes, and all else with them.
            self.llm.sleep(level=2, mode=mode)
            self._awake = set()
        elif self._awake - wanted:
            # Level 1 would send the weights to the host and back. Level 0 only pauses; then the cache alone goes.
            # vLLM's own release_kv_cache_memory does the same, but refuses while requests that finished in the last
            # step are on record.
            self.llm.sleep(level=0, mode=mode)
            self.llm.reset_prefix_cache(reset_running_requests=True)
            self.llm.model_executor.discard(("kv_cache",))
            self._awake = {"weights"}
        if wanted - self._awake:
            self.llm.wake_up(tags=sorted(wanted - self._awake))
        self._awake = wanted

    def die_with_workers(self) -> None:
        """Ends this process from now on when a worker ends before `shutdown`: its owner restarts whole engines only."""
        executor = self.llm.model_executor

        if isinstance(executor, MultiprocExecutor):
            threading.Thread(target=end_with_worker, args=(executor,), daemon=True).start()

    def shutdown(self) -> None:
        """Ends the engine and its worker processes."""
        self.llm.engine_core.shutdown()

    @property
    def _cache_salt(self) -> str | None:
        # Keeps requests from using what requests of older weights have cached.
        return str(self.weight_version) if self._keeps_kv_cache else None

    def _take_questions(self, weight_version: int) -> None:
        questions, withdrawn = self.callers.take()
        if withdrawn:
            self.settle()
            self.llm.abort_request(withdrawn)
        for question in questions:
            prompt = question.prompt
            if prompt["type"] == "token" and self._cache_salt is not None:
                prompt["cache_salt"] = self._cache_salt
            try:
                vllm_id = self.llm.add_request(
                    question.question_id, prompt, question.params, lora_request=self._adapter
                )
            except Exception as error:
                # Whatever vLLM's checks trip over is the fault of who asked and must not end the engine: a lone
                # surrogate is a TypeError.
                question.answer(error)
            else:
                self.callers.note(question, vllm_id, weight_version=weight_version, num_refits=self._num_refits)

    def _take_routes(self, vllm_ids: Sequence[str], answers: Sequence[CompletionOutput]) -> Sequence[np.ndarray | None]:
        """Routes of finished requests, in order; None for each where none are kept."""
        if self._expert_layers is None or not answers:
            return [None] * len(answers)
        if current_platform.is_cpu():
            found = {
                vllm_id: routes
                for answer in self._workers("take_routes", vllm_ids)
                for vllm_id, routes in answer.items()
            }
            return [found[vllm_id] for vllm_id in vllm_ids]
        # vLLM's own have rows for layers without experts too.
        return [
            None if (routes := answer.routed_experts) is None else routes[:, self._expert_layers] for answer in answers
        ]

    def _routes_of_question(self, vllm_ids: Sequence[str], output: RequestOutput) -> Sequence[np.ndarray | None] | None:
        if self._expert_layers is None:
            return None
        lengths = [len(output.prompt_token_ids or ()) + len(answer.token_ids) - 1 for answer in output.outputs]
        found = zip(self._take_routes(vllm_ids, output.outputs), lengths, strict=True)
        return [None if routes is None or len(routes) < length else routes[:length] for routes, length in found]

    def _workers(self, method: str, *arguments: object) -> list:
        return self.llm.collective_rpc(method, timeout=self._worker_timeout_s, args=arguments)


def end_with_worker(executor: MultiprocExecutor) -> None:
    """Waits until a worker process on this node ends, then ends this process, unless the executor is shutting down."""
    drop_names_of_shared_memory([os.getpid(), *(worker.proc.pid or 0 for worker in executor.workers)])
    multiprocessing.connection.wait([worker.proc.sentinel for worker in executor.workers])
    # vLLM's own monitor sets `is_failed` before it shuts down what is left.
    if executor.is_failed or not getattr(executor, "shutting_down", False):
        end_engine("A worker process of the engine ended")


def end_engine(reason: str) -> NoReturn:
    """Ends this process and its workers. One waiting for a dead worker in a collective would long keep its memory."""
    logger.error("%s; ending the engine", reason)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def run_part(
    model_dir: str,
    config: GenerationConfig,
    *,
    seed: int,
    nodes: EngineNodes,
    device_ids: Sequence[int] = (),
    keeps_routes: bool = False,
    tokenizer: str | None = None,
    adapters: HeldAdapters | None = None,
) -> NoReturn:
    """Runs an `Engine`'s workers with the same arguments on a further node, until one ends, and the process with it."""
    arguments = engine_arguments(
        model_dir,
        config,
        seed=seed,
        device_ids=device_ids,
        keeps_routes=keeps_routes,
        tokenizer=tokenizer,
        nodes=nodes,
        adapters=adapters,
    )
    # As vLLM's own headless nodes do. Its monitor would end the other workers, and not the process.
    config_of_node = arguments.create_engine_config(headless=True)
    executor = MultiprocExecutor(
        as_one(config_of_node) if arguments.data_parallel_size > 1 else config_of_node, monitor_workers=False
    )
    end_with_worker(executor)
    raise RuntimeError("vLLM has shut down the workers of this node")
