# SPDX-License-Identifier: Apache-2.0
"""`python -m scripts.mutations`: breaks 63 behaviours one by one in a checkout copy; names those that no test misses.

Run it by hand after a change of the tests: it takes ten to twenty seconds a mutation. Exit code 1: a mutation has
survived.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# By part: what holds | the narrowest test below tests/ that must fail without it; then FILE: its unique text >>> what
# takes its place.
TABLE = r"""
# refit
a box that differs from its source ends the refit | unit/refit/test_pull.py::test_a_byte_that_changes_after_the_pull_is_caught
mrl/refit/pull.py: (batch.checksums.take() != expected) >>> (expected != expected)
padding is written anew by each refit | unit/refit/test_pull.py::test_padding_is_rewritten_and_verified
mrl/refit/pull.py: target.zero_() >>> pass
tensors that moved since the preparation end the refit | unit/refit/test_pull.py::test_live_tensors_must_stay_where_they_are
mrl/refit/pull.py: self._check_addresses(self._live()) >>> pass
an old handle to memory is refused | unit/refit/test_pull.py::test_an_old_handle_is_refused
mrl/refit/memory.py: if epoch != self.handle.epoch: >>> if epoch == _RELEASED:
a buffer is filled again only when its round was read | unit/refit/test_pull.py::test_a_round_waits_until_its_buffer_was_read
mrl/refit/exchange.py: round_index + 1 - NUM_BUFFERS, deadline >>> round_index - NUM_BUFFERS, deadline
refit zero notices a tensor that one digest lacks | unit/refit/test_pull.py::test_refit_zero_names_what_the_tables_get_wrong
mrl/refit/checksum.py: before.keys() | after.keys() >>> before.keys() & after.keys()
a device checksum counts the places of blocks | unit/refit/test_device_checksum.py::test_blocks_that_trade_places_and_lost_zeros_show
mrl/refit/device_checksum.py: (blocks * outer[:-1]).sum() >>> blocks.sum()
# conversion and schedule
inputs of a layer are cut on the second axis | unit/conversion/test_cuts.py::test_columns_and_rows_and_replicas
conversion/cuts.py: ((0, rows), (start, stop)), _full(shape) >>> ((start, stop), (0, rows)), _full(shape)
neighbouring workers share a key head | unit/conversion/test_cuts.py::test_vllm_concatenates_query_key_value_and_repeats_key_heads
conversion/cuts.py: low = shard.rank // (shard.size // num_groups) >>> low = shard.rank % num_groups
the vocabulary is padded by the tensor-parallel size | unit/conversion/test_cuts.py::test_the_vocabulary_is_padded_before_it_is_cut
conversion/cuts.py: MEGATRON_VOCABULARY_MULTIPLE * shard.size >>> MEGATRON_VOCABULARY_MULTIPLE
the first workers take the experts that are left over | unit/conversion/test_cuts.py::test_experts_are_placed_then_cut
conversion/cuts.py: + min(expert_shard.rank, remainder) >>> + 0
chunks are interleaved over the stages | unit/conversion/families/test_decoders.py::test_chunks_are_interleaved_over_the_stages
conversion/families/common.py: (chunk * num_layers + sum(sizes[:pp_rank])) >>> (chunk * sizes[pp_rank] + sum(sizes[:pp_rank]) * self.vpp)
two rounds in a row lie in two buffers | unit/conversion/test_reshard.py::test_rounds_and_boxes_stay_within_the_buffer
conversion/schedule.py: message.round % NUM_BUFFERS * align(found.region_bytes) >>> 0
adapters are merged with their scale | unit/conversion/test_lora_export.py::test_the_adapters_are_what_is_merged
conversion/tensors.py: (b.float() @ a.float()).mul_(scale) >>> b.float() @ a.float()
# losses and advantages
PPO takes the worse of two surrogates | unit/algo/test_losses.py::test_clipped_surrogate_by_hand
mrl/algo/losses.py: torch.maximum(surrogate_T, clipped_T) >>> torch.minimum(surrogate_T, clipped_T)
a mean is one over the global batch | unit/algo/test_losses.py::test_however_a_batch_is_cut_loss_gradient_and_metrics_are_those_of_one_row
mrl/algo/losses.py: loss_mask_T / max(size.num_valid_tokens, 1.0) >>> loss_mask_T / loss_mask_T.sum().clamp(min=1.0)
tokens outside the mask have no effect | unit/algo/test_losses.py::test_what_is_outside_the_mask_has_no_effect
mrl/algo/losses.py: is_valid_T = (loss_mask_T > 0) & ~ >>> is_valid_T = ~
importance weights are trainer over generator | unit/algo/test_nemo_rl.py::test_the_answers_are_those_of_nemo_rl
mrl/algo/losses.py: drift_T = tokens.old_logprobs_T - >>> drift_T = -tokens.old_logprobs_T +
KL is that of the policy to the reference | unit/algo/test_ratios.py::test_k1_and_k3_are_unbiased_estimates
mrl/algo/ratios.py: log_ratio_T = reference_logprobs_T - logprobs_T >>> log_ratio_T = logprobs_T - reference_logprobs_T
rollouts without a reward are in no baseline | unit/algo/test_advantages.py::test_rollouts_without_a_reward_take_no_part
mrl/algo/advantages.py: if has_reward_G is None else has_reward_G >>> if True else has_reward_G
the last token of a rollout is terminal | unit/algo/test_critic.py::test_gae_is_the_sum_of_discounted_errors
mrl/algo/critic.py: torch.where(is_last_N, 0.0, values_N.roll(-1)) >>> values_N.roll(-1)
# logprobs and packing
logits are divided by the temperature | stack/policy/test_logprobs.py::test_scores_are_those_of_torch_on_the_logits_that_vllm_keeps
mrl/policy/logprobs.py: .to(torch.float32, copy=True).div_(self.distribution.temperature) >>> .to(torch.float32, copy=True)
padding of the vocabulary is no token | stack/policy/test_logprobs.py::test_scores_are_those_of_torch_on_the_logits_that_vllm_keeps
mrl/policy/logprobs.py: min(max(self.distribution.vocab_size - self.first, 0), self.num_columns) >>> self.num_columns
context-parallel ranks count metrics once | stack/policy/test_context.py::test_steps_have_the_metrics_of_one_rank
mrl/policy/objectives.py: value if extreme_of(name) else value / cp_size >>> value
ranks divide by the size of the whole batch | stack/policy/test_step.py::test_all_ranks_return_the_same_metrics
mrl/policy/batch.py: dist.all_reduce(counts, group=group) >>> pass
a step that is not finite changes nothing | stack/policy/test_step.py::test_a_step_that_is_not_finite_stops_all_ranks_and_changes_nothing
mrl/policy/step.py: if is_bad and not skips: >>> if False:
masks begin at the last token of the prompt | unit/data/test_packing.py::test_a_row_by_hand
mrl/data/packing.py: shift = start + prompt_length - 1 >>> shift = start + prompt_length
a sequence that is not valid is not trained | unit/data/test_packing.py::test_an_invalid_sequence_is_generated_but_not_trained
mrl/data/packing.py: if sequence.is_valid: >>> if True:
late chunks of a zigzag run backwards | unit/policy/test_attention.py::test_a_zigzag_by_hand
mrl/policy/packed.py: starts_S + (2 * cp_size - 1 - cp_rank) * chunks_S >>> starts_S + (cp_size + cp_rank) * chunks_S
both shares of a rank's load count, each for itself | unit/data/test_planning.py::test_the_larger_of_both_shares_decides_and_not_their_sum
mrl/data/planning.py: (loads + shares[index]).max(axis=1) >>> (loads + shares[index]).sum(axis=1)
a developer's message is a system message | unit/data/test_rows.py::test_a_developers_message_that_comes_first_is_the_system_message
mrl/data/rows.py: if first["role"] in LEADING: >>> if first["role"] == "system":
# ledger and checkpoints
an event is on disk when the call returns | unit/store/test_ledger.py::test_an_event_is_on_disk_when_the_call_returns
mrl/store/ledger.py: sync_descriptor(descriptor, self.path) >>> pass
no prompt is taken twice | unit/store/test_ledger.py::test_gaps_and_duplicates_are_refused_by_line
mrl/store/ledger.py: if key in state.taken or key in state.consumed >>> if key in state.taken
files are on disk before a checkpoint is named | unit/store/test_checkpoints.py::test_a_checkpoint_is_on_disk_before_it_gets_its_name
mrl/store/checkpoints.py: sync_file(pending.folder / name) >>> pass
who has lost the folder publishes nothing | unit/store/test_ownership.py::test_who_has_lost_the_folder_publishes_nothing_more
mrl/store/checkpoints.py: self._check_owner() >>> pass
files are compared by content | unit/store/test_checkpoints.py::test_a_damaged_checkpoint_is_passed_over_and_said
mrl/store/checkpoints.py: return find_difference(read) or None >>> return None
no checkpoint comes before its steps in the ledger | unit/loop/test_saving.py::test_a_checkpoint_waits_for_its_steps_in_the_ledger
mrl/loop/saving.py: self._folder.ledger.flush() >>> pass
# resume, identity, cache
the order of rows changes with the epoch | unit/data/test_order.py::test_the_order_is_fixed_for_ever
mrl/data/order.py: np.random.PCG64([seed, epoch]) >>> np.random.PCG64([seed, 0])
what is consumed in one epoch comes in the next | unit/data/test_order.py::test_what_is_consumed_is_left_out_and_nothing_else
mrl/data/order.py: if (epoch, id_at(index)) not in consumed and >>> if (0, id_at(index)) not in consumed and
arguments of the chat template belong to a run | unit/store/test_identity.py::test_another_content_is_another_identity
mrl/store/identity.py: _digest(tokenizer.chat_template_kwargs or {}) >>> _digest({})
no rank loads what one has found damaged | unit/loop/test_saving.py::test_a_run_goes_on_before_the_shard_that_a_rank_finds_damaged
mrl/loop/saving.py: if not damage: >>> if True:
the version of the conversion belongs to the key of an entry | unit/conversion/test_cache.py::test_the_key_follows_from_content_alone
conversion/cache.py: "dtype": None, "table_version": TABLE_VERSION >>> "dtype": None
an entry in use outlives gc | unit/conversion/test_cache_gc.py::test_what_is_in_use_stays
conversion/cache.py: lambda _, item=item: _is_unused(item) >>> lambda _: True
a model that changes meanwhile is refused | unit/conversion/test_cache.py::test_a_model_that_changes_while_it_is_converted_is_refused
conversion/cache.py: if entry_key(hf, root, reads_all=True) != key: >>> if False:
an entry is on disk before it is published | unit/conversion/test_cache.py::test_an_entry_is_on_disk_before_it_gets_its_name
conversion/cache.py: sync_tree(aside) >>> pass
# confinement and graders
a program starts no processes | unit/envs/test_confine.py::test_the_filter_of_programs
mrl/envs/confine.py: CLONE_THREAD, mask=CLONE_THREAD | CLONE_NEW >>> 0, mask=CLONE_NEW
a worker without network opens no socket | hostile/test_workers.py::test_a_worker_that_is_taken_over_does_no_harm
mrl/envs/confine.py: [NETWORK_CALLS] * has_network >>> [NETWORK_CALLS]
a program sees no variable of its grader | unit/envs/test_code.py::test_nothing_of_the_parent_reaches_a_program
mrl/envs/code.py: env={"TMPDIR": str(folder), **ONE_THREAD} >>> env={**os.environ, "TMPDIR": str(folder)}
the last code block is the program | unit/envs/test_code.py::test_the_last_block_counts
mrl/envs/code.py: lines[fences[-2] + 1 : fences[-1]] >>> lines[fences[0] + 1 : fences[1]]
the last answer counts | unit/envs/test_math.py::test_dapo_takes_what_follows_the_last_answer
mrl/envs/math.py: plain_answer(lines[-1]) >>> plain_answer(lines[0])
several letters choose nothing | unit/nemo/gym/graders/test_mcqa.py::test_letters_and_words_around_them
mrl/envs/letters.py: if MORE.match(behind) or ( >>> if (
every instruction must be followed | unit/nemo/gym/graders/test_instruction_following.py::test_all_instructions_must_be_followed
mrl/nemo/gym/graders/instruction_following.py: float(not broken) >>> float(len(broken) < len(names))
# config rules and plan
slots are a multiple of a whole replica | unit/config/rules/test_table.py::test_a_config_is_told_the_key_the_rule_and_the_way_out
mrl/config/rules/layout.py: if ranks % needed: >>> if ranks < needed:
old rollouts need the correction | unit/config/rules/test_table.py::test_a_config_is_told_the_key_the_rule_and_the_way_out
mrl/config/rules/algorithms.py: if lag > 1 and not config.loss_fn >>> if lag > 2 and not config.loss_fn
every token has an embedding | unit/config/rules/test_tokens.py::test_tokens_without_an_embedding_are_refused
mrl/config/rules/tokens.py: if not 0 < columns < needed: >>> if not 0 < columns < needed - 1:
tensor-parallel ranks share no optimizer state | unit/plan/test_plan.py::test_optimizer_state_is_spread_over_ranks_that_hold_the_same
mrl/plan/facts.py: dense_shards=ranks // megatron.tensor_model_parallel_size if >>> dense_shards=ranks if
a worker holds a key head that it shares | unit/plan/test_engine.py::test_states_have_the_type_of_the_model_where_the_run_names_none
mrl/plan/engine.py: max(1, shape.kv_heads // tp) >>> shape.kv_heads / tp
# hangs, rollouts and gateway
a process that reads or writes is at work | unit/cluster/test_hangs.py::test_a_process_that_reads_or_writes_is_at_work
mrl/cluster/hangs.py: or last_io_bytes - io_bytes > enough[1] >>> or False
no rollout is older than the lag | unit/loop/test_rollout_queue.py::test_nothing_is_lost_or_trained_twice_over_a_kill
mrl/loop/queue.py: group.oldest_version > self.plan.lag >>> group.oldest_version > self.plan.lag + 1
surplus ages by a version | unit/loop/test_rollout_queue.py::test_surplus_of_a_synchronous_step_is_drawn_again_by_the_next_weights
mrl/loop/queue.py: next_version=state.weight_version + 1) >>> next_version=state.weight_version)
a turn is trained in one sequence | unit/rollout/test_turn_tree.py::test_a_retry_shares_its_beginning_and_trains_it_once
mrl/rollout/turn_tree.py: taken.update(mine) >>> pass
what a grammar forced is not trained | unit/rollout/test_gateway.py::test_what_a_grammar_forced_is_not_trained
mrl/rollout/turn_tree.py: NO_ROUTES if has_gap else answer.untrained >>> NO_ROUTES if has_gap else ""
turns have seeds of their own | unit/rollout/test_gateway.py::test_what_a_session_may_not_choose_is_overridden_and_counted
mrl/rollout/agent_session.py: hashed_seed(f"{self.seed}/{self.num_asked}") >>> self.seed
"""


class Mutation(NamedTuple):
    """An edit that breaks one behaviour, and the test (a node id) that must fail with it."""

    part: str
    behaviour: str
    test: str
    file: str
    text: str
    replacement: str


def table() -> list[Mutation]:
    """All mutations of `TABLE`."""
    found, part, lines = list[Mutation](), "", iter(TABLE.strip().splitlines())
    for line in lines:
        if line.startswith("# "):
            part = line[2:]
            continue
        (behaviour, test), (file, edit) = line.split(" | "), next(lines).split(": ", 1)
        found.append(Mutation(part, behaviour, f"tests/{test}", file, *edit.split(" >>> ")))
    return found


def copy_checkout(folder: Path) -> None:
    """Copies the files of the checkout, except those that git ignores, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.split(
        "\0"
    ):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Exit code of pytest in the copy, and the first line that says what failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=600", *tests]
    # Python knows its compiled code by size and second of the source, and a mutation may change neither.
    variables = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    printed = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, errors="replace", timeout=3600
    )
    lines = printed.stdout.strip().splitlines() or [""]
    return printed.returncode, next((line[1:].strip() for line in lines if line.startswith("E  ")), lines[-1])


def try_mutation(folder: Path, mutation: Mutation) -> tuple[str, str]:
    """The outcome of one mutation in the copy, and why."""
    path = folder / mutation.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutation.text) != 1:
        return "text not found", f"it stands there {source.count(mutation.text)} times"
    path.write_text(source.replace(mutation.text, mutation.replacement), encoding="utf-8")
    code, reason = run_tests(folder, [mutation.test])
    path.write_text(source, encoding="utf-8")
    return {0: "SURVIVED", 1: "killed"}.get(code, "not run"), reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--only", metavar="WORD", default="", help="only those with this word in part, behaviour, test or file"
    )
    parser.add_argument("--clean", action="store_true", help="first run all their tests without a mutation")
    arguments = parser.parse_args()
    chosen, num_killed = [mutation for mutation in table() if any(arguments.only in text for text in mutation[:4])], 0
    with tempfile.TemporaryDirectory(prefix="mrl-mutations-") as name:
        copy_checkout(folder := Path(name))
        if arguments.clean and (failed := run_tests(folder, sorted({mutation.test for mutation in chosen})))[0]:
            sys.exit(f"without a mutation: {failed[1]}")
        for mutation in chosen:
            started = time.monotonic()
            outcome, reason = try_mutation(folder, mutation)
            num_killed += outcome == "killed"
            seconds = f"{time.monotonic() - started:.0f} s"
            print(
                f"{mutation.behaviour} | {mutation.file} | {mutation.test} | {outcome} | {seconds} | {reason:.100}",
                flush=True,
            )
    print(f"{num_killed} of {len(chosen)} killed")
    return int(num_killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
