# SPDX-License-Identifier: Apache-2.0
"""The page of a run in a real Chromium: every tab, hover, filters, what a model writes, and the live view."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.texts import safe_text
from mrl.ops.view.page import write_report
from mrl.ops.view.server import Runs, server_of
from scripts.chromium import Tab
from tests.browser.test_plan import texts
from tests.unit.ops.view.runs import make_long_run, make_run, rollout, row, write_dump, write_metrics

ATTACK = (
    "<img src=https://example.com/x onerror=window.owned=1></pre></script><script>window.owned=1</script>\x1b[2J\u202e"
)


@pytest.fixture
def live(tab: Tab, tmp_path: Path) -> Iterator[str]:
    server = server_of(Runs([make_run(tmp_path / "one"), make_run(tmp_path / "two", num_steps=9)]), 0, "token")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/token/"
    tab.call("Page.navigate", url="about:blank")
    server.shutdown()
    server.server_close()


def open_report(tab: Tab, folder: Path, **size: int) -> None:
    write_report(folder / "report.html")
    tab.requests.clear()
    tab.errors.clear()
    tab.open(f"file://{folder}/report.html", **size)


def choose(tab: Tab, label: str, value: str) -> None:
    tab.evaluate(
        f"(() => {{ const e = document.querySelector('[aria-label={json.dumps(label)}]'); e.value = "
        f"{json.dumps(value)}; "
        "e.dispatchEvent(new Event('change')); })()"
    )


def draw_all_tabs(tab: Tab) -> list[str]:
    names = texts(tab, "nav button")
    for name in names:
        tab.evaluate(
            f"[...document.querySelectorAll('nav button')].find((e) => e.textContent === {json.dumps(name)}).click()"
        )
        tab.wait(f"document.querySelector('main').dataset.shown === {json.dumps(name.lower())}")
        assert len(str(tab.evaluate("document.querySelector('main').textContent"))) > 50
    return names


def test_every_tab_is_drawn_without_an_error_and_a_request(tab: Tab, tmp_path: Path):
    open_report(tab, make_run(tmp_path / "run"))
    assert draw_all_tabs(tab) == ["Overview", "Rollouts", "Timeline", "Resources"]
    assert tab.errors == [] and tab.requests == [f"file://{tmp_path}/run/report.html"]


@pytest.mark.parametrize(
    ("algorithm", "metrics", "titles"),
    [
        ("sft", {"val/val_loss": 2.0}, ["Held-out loss", "Loss", "Gradient norm"]),
        (
            "dpo",
            {"train/accuracy": 0.5, "train/rewards_margin_mean": 0.1, "val/validation-default_loss": 0.7},
            [
                "Held-out loss",
                "Preferred answers that win",
                "Reward margin of the preferred answer",
                "Loss",
                "Gradient norm",
            ],
        ),
        ("rm", {"train/accuracy": 0.5}, ["Preferred answers that win", "Loss", "Gradient norm"]),
    ],
)
def test_a_run_without_engines_has_the_curves_that_it_has(
    tab: Tab, tmp_path: Path, algorithm: str, metrics: dict, titles: list[str]
):
    folder = tmp_path / algorithm
    folder.mkdir()
    (folder / "config.yaml").write_text(
        f"algorithm: {algorithm}\n{algorithm}: {{max_num_steps: 9}}\npolicy: {{model_name: tiny}}\n"
    )
    own = {"train/loss": 1.0, "train/grad_norm": 1.0, "time/total": 2.0, "time/train": 1.5} | metrics
    write_metrics(
        folder,
        [
            {"step": step, "train/lr": 0.1, **{name: value + step for name, value in own.items()}}
            for step in range(1, 4)
        ],
    )
    open_report(tab, folder)
    tab.wait("document.querySelector('.chart canvas')")
    assert texts(tab, ".u-title") == [*titles, "Seconds by phase"] and "3 of 9" in texts(tab, "dd")
    assert texts(tab, "main li") == ["Learning rate: train/lr = 0.1"]
    assert texts(tab, "nav button") == ["Overview", "Resources"] and tab.errors == []


def test_a_chart_tells_the_value_under_the_mouse(tab: Tab, tmp_path: Path):
    open_report(tab, make_run(tmp_path / "run"))
    tab.wait("document.querySelector('.chart canvas')")
    tab.move_to(".chart .u-over")
    # The middle of steps 0 to 5; the rewards of 1 to 5 are 0.11 to 0.15.
    tab.wait(
        "['0.12', '0.13'].includes(document.querySelector('.chart .u-series:nth-child(2) .u-value').textContent.trim())"
    )


def test_changed_keys_of_an_attempt_and_rewards_have_their_names(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run")
    for number, rate in ((1, "0.001"), (2, "0.01")):
        attempt = folder / f"logs/exp_{number:03d}"
        attempt.mkdir(parents=True, exist_ok=True)
        (attempt / "config.yaml").write_text((folder / "config.yaml").read_text().replace("0.001", rate))
    held_out = [{f"val__{name}": 0.1 * step for name in ("accuracy", "reward")} for step in range(1, 6)]
    rows = [row(step, **found) for step, found in enumerate(held_out, 1)]
    write_metrics(folder, [*rows[:2], {**rows[2], "logger/attempt": 2.0}, *rows[3:]])
    open_report(tab, folder)
    tab.wait("document.querySelector('.chart canvas')")
    assert "from step 3: policy.megatron_cfg.optimizer.lr: 0.001 -> 0.01" in texts(tab, "dd")
    labels = texts(tab, ".u-label")
    assert "val/reward" in labels and "val/accuracy" not in labels and tab.errors == []


def test_seconds_by_phase_add_up_with_small_phases_together(tab: Tab, tmp_path: Path):
    folder, small = make_run(tmp_path / "run"), {"time__refit": 0.01, "time__checkpoint": 0.02, "time__teacher": 0.0}
    times = [row(step, time__generation=1.0 + step, time__train=2.0, **small) for step in range(1, 6)]
    write_metrics(folder, [{"step": 0, "val/accuracy": 0.1}, *times])
    open_report(tab, folder)
    tab.wait("charts.some(([plot]) => plot.series.some((one) => one.label === 'generation'))")
    plot = "charts.find(([plot]) => plot.series.some((one) => one.label === 'generation'))[0]"
    assert tab.evaluate(f"{plot}.series.map((one) => one.label)") == [
        "step",
        "other: teacher, refit, checkpoint",
        "train",
        "generation",
    ]
    assert tab.evaluate(f"{plot}.data.slice(1).map((column) => [column[0], Number(column[1].toFixed(2))])") == [
        [None, 4.03],
        [None, 4.0],
        [None, 2.0],
    ]
    assert tab.evaluate(f"{plot}.scales.y.min") == 0
    # The colours of the timeline.
    assert tab.evaluate(f"{plot}.series.slice(2).map((one) => one._stroke)") == ["#059669", "#2563eb"]


def test_a_curve_that_never_moves_is_told_in_words(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_metrics(folder, [row(step, train__kl_penalty=0.0, train__gen_kl_error=0.1 * step) for step in range(1, 6)])
    open_report(tab, folder)
    tab.wait("document.querySelector('.chart canvas')")
    assert "Engine against trainer, KL" in texts(tab, ".u-title") and "train/kl_penalty" not in texts(tab, ".u-label")
    assert "KL to the reference: train/kl_penalty = 0" in texts(tab, "main li")


def test_a_run_of_one_step_has_its_values_and_nothing_about_curves(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=1)
    shutil.rmtree(folder / "logs")
    sample = {"step": 1, "split": "train", "prompt": "1+1=", "text": "2", "extracted": "", "expected": "2"}
    (folder / "samples.jsonl").write_text(json.dumps(sample | {"reward": 1.0, "status": "ok"}) + "\n")
    open_report(tab, folder)
    assert "Measured once so far" in texts(tab, "h2") and "Unchanged so far" not in texts(tab, "h2")
    assert "Loss: train/loss = 0.1" in texts(tab, "main li") and texts(tab, ".chart, input, .controls small") == []
    tab.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    assert texts(tab, "th") == ["step", "split", "prompt", "rollout", "expected", "reward"]
    write_dump(
        folder, 1, [rollout(0, "plain", extracted="", rewards=0.3), rollout(1, "shown", extracted="7", rewards=1)]
    )
    open_report(tab, folder)
    tab.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    assert tab.evaluate("[...document.querySelectorAll('.card')].map((one) => one.className)") == [
        "card partly",
        "card good",
    ]
    assert [text for text in texts(tab, ".card small") if "reward" not in text] == ["extracted 7"]


def test_environments_have_curves_of_their_own_where_there_are_several(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_metrics(folder, [row(step, rollout__math__reward=0.1 * step) for step in range(1, 6)])
    open_report(tab, folder)
    tab.wait("document.querySelector('.chart canvas')")
    assert "Reward by environment" not in texts(tab, ".u-title")
    write_metrics(
        folder, [row(step, rollout__math__reward=0.1 * step, rollout__code__reward=0.2) for step in range(1, 6)]
    )
    open_report(tab, folder)
    tab.wait("document.querySelector('.chart canvas')")
    assert "Reward by environment" in texts(tab, ".u-title") and "rollout/code/reward" in texts(tab, ".u-label")


def test_the_page_leads_to_its_tabs_and_to_the_files_of_the_run(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_metrics(folder, [row(step, rollout__groups_without_signal=4.0) for step in range(1, 6)])
    open_report(tab, folder)
    assert tab.evaluate("[...document.querySelectorAll('dd a')].map((e) => e.getAttribute('href'))") == [
        "config.yaml", "metrics.jsonl", "logs/exp_001/", "logs/exp_001/actors/"]  # fmt: skip
    tab.evaluate("document.querySelector('.advice a[href=\"#rollouts\"]').click()")
    tab.wait("document.querySelector('main').dataset.shown === 'rollouts'")
    tab.open(f"file://{folder}/report.html#timeline")
    tab.wait("document.querySelector('main').dataset.shown === 'timeline'")


def test_the_page_is_dark_where_the_reader_wants_it(tab: Tab, tmp_path: Path):
    def brightness(part: str) -> int:
        return sum(
            int(found) for found in re.findall(r"\d+", str(tab.evaluate(f"getComputedStyle(document.body).{part}")))[:3]
        )

    folder = make_run(tmp_path / "run")
    for mode, is_dark in (("dark", True), ("light", False)):
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": mode}])
        open_report(tab, folder)
        assert (brightness("color") > brightness("backgroundColor")) is is_dark


def test_a_narrow_screen_needs_no_scrolling_sideways(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_metrics(
        folder,
        [row(step, **{"performance__policy_training_tokens_per_sec_per_gpu_and_more": 1.0}) for step in range(1, 6)],
    )
    open_report(tab, folder, width=390, height=800)
    tab.wait("document.querySelector('.chart canvas')")
    for name in texts(tab, "nav button"):
        tab.evaluate(f"document.querySelector('[data-tab={name.lower()}]').click()")
        assert tab.evaluate("document.documentElement.scrollWidth <= 390"), name


def test_rollouts_are_filtered_and_sorted(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=1)
    rows = [rollout(index, f"answer {index}", finish_reason="length" if index == 3 else "stop") for index in range(6)]
    write_dump(folder, 1, [*rows, rollout(6, "hidden", masked="timeout: 30 s"), rollout(7, "last")])
    open_report(tab, folder)
    tab.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    assert len(texts(tab, ".card")) == 8 and len(texts(tab, ".group")) == 4
    choose(tab, "show", "truncated")
    assert texts(tab, ".card pre") == ["answer 3"]
    choose(tab, "show", "masked")
    assert texts(tab, ".card pre") == ["hidden"] and "masked: timeout: 30 s" in texts(tab, ".card small")[0]
    choose(tab, "show", "all")
    choose(tab, "text", "answer 4")
    assert texts(tab, ".card pre") == ["answer 4"]
    choose(tab, "text", "")
    choose(tab, "reward from", "0.5")
    choose(tab, "sort", "reward")
    assert texts(tab, ".card pre") == ["answer 1", "answer 3", "answer 5", "last"]
    choose(tab, "reward from", "")
    choose(tab, "sort", "order")
    choose(tab, "show", "all")


def test_a_conversation_is_shown_message_by_message(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=1)
    said = [
        {"role": "system", "content": "be short"},
        {"role": "assistant", "content": "two"},
        {"role": "tool", "content": ATTACK},
    ]
    again = [{"role": "user", "content": "sub"}, {"role": ATTACK, "content": "4"}]
    rows = [rollout(0, "two", conversations=[said, again]), rollout(1, "plain"), rollout(2, "odd", conversations=[[7]])]
    write_dump(folder, 1, rows)
    open_report(tab, folder)
    tab.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    assert texts(tab, ".card pre") == ["be short", "two", safe_text(ATTACK), "sub", "4", "plain", "odd"]
    shown = ["conversation 1 of 2", "system", "assistant", "tool", "conversation 2 of 2", "user", safe_text(ATTACK, 40)]
    assert [text for text in texts(tab, ".card small") if "reward" not in text] == shown
    assert tab.evaluate("window.owned === undefined && document.querySelectorAll('main img, main script').length === 0")
    choose(tab, "text", "be short")
    assert texts(tab, ".card pre")[0] == "be short" and len(texts(tab, ".card")) == 1
    choose(tab, "text", "")


def test_a_rollout_is_shown_token_by_token(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=1)
    tokens = {"token_ids": [5, 6, 7, 8], "token_texts": ["1+", "<b>", "9", "<eos>"], "token_special": [0, 0, 0, 1]}
    tokens |= {"token_generated": [0, 1, 0, 1], "token_loss_mask": [0, 1, 0, 0], "token_advantages": [0, 2.0, 0, -1.0]}
    tokens |= {"token_entropies": [0, 0.25, 0, 2.0]}
    tokens |= {"generation_logprobs": [0, -0.25, 0, -1.0], "prev_logprobs": [0, -0.5, 0, -1.0]}
    write_dump(folder, 1, [rollout(0, "plain"), rollout(1, "shown", **tokens)])
    open_report(tab, folder)
    tab.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    tab.evaluate("document.querySelector('[data-tokens]').click()")
    assert texts(tab, ".token") == ["1+", "<b>", "9", "<eos>"] and texts(tab, ".token.special") == ["<eos>"]
    assert texts(tab, ".token.given") == ["1+", "9"]
    assert texts(tab, ".turn small") == [
        "prompt, 1 token",
        "turn 1, 1 token",
        "environment, 1 token",
        "turn 2, 1 token",
    ]
    tab.move_to(".turn:nth-of-type(2) .token")
    tab.wait("document.querySelector('.tip').textContent.includes('token 6')")
    assert texts(tab, ".tip") == [
        "token 6 at 1 · generator logprob -0.25 · trainer logprob -0.5 · |dlogp| 2.50e-1 · entropy 0.25 · "
        "probability 0.7788 · advantage 2 · in the loss"
    ]
    tone = "getComputedStyle(document.querySelectorAll('.token')[{}]).backgroundColor"
    assert tab.evaluate(tone.format(1)) != tab.evaluate(tone.format(0)) == "rgba(0, 0, 0, 0)"
    choose(tab, "colour by", "entropy")
    faint, strong = (float(str(tab.evaluate(tone.format(index))).rpartition(",")[2].rstrip(")")) for index in (1, 3))
    assert 0 < faint < strong
    choose(tab, "colour by", "advantage")
    assert "220, 38, 38" in str(tab.evaluate(tone.format(3))) and "5, 150, 105" in str(tab.evaluate(tone.format(1)))


def test_tool_calls_of_the_model_are_marked(tab: Tab, tmp_path: Path):
    said = ["<tool_call>", "<tool", "_call>", "add", "</tool_call>", " and ", "<tool_call>sub", "<eos>"]
    tokens = {
        "token_ids": list(range(8)),
        "token_texts": said,
        "token_special": [0] * 8,
        "token_generated": [0] + [1] * 7,
    }
    tokens |= {name: [0.0] * 8 for name in ("token_loss_mask", "token_advantages", "generation_logprobs")}
    folder = make_run(tmp_path / "run", num_steps=1)
    write_dump(folder, 1, [rollout(0, "calls", **tokens)])
    open_report(tab, folder)
    tab.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    tab.evaluate("document.querySelector('[data-tokens]').click()")
    assert texts(tab, ".turn small") == ["prompt, 1 token", "turn 1, 7 tokens, 2 tool calls"]
    # The second one has no end: the rest belongs to it.
    assert texts(tab, ".token.tool") == [*said[1:5], *said[6:]]


def test_an_agents_turns_say_what_is_not_trained(tab: Tab, tmp_path: Path):
    said = ["ask", "first", "tool", "<TOOLCALL>add", "</TOOLCALL>", "tool", "last"]
    tokens: dict[str, object] = {"token_ids": list(range(7)), "token_texts": said, "token_special": [0] * 7}
    tokens |= {name: [0.0] * 7 for name in ("token_loss_mask", "token_advantages", "generation_logprobs")}
    tokens |= {
        "token_generated": [0] * 6 + [1],
        "token_untrained": [[1, 2, "elsewhere"], [3, 5, "forced"], [7, 9, "cut"]],
    }
    other = tokens | {"token_generated": [0, 1, 0, 0, 0, 0, 0], "token_untrained": []}
    folder = make_run(tmp_path / "run", num_steps=1)
    write_dump(folder, 1, [rollout(0, "calls", **tokens, further=[other])])
    open_report(tab, folder)
    tab.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    tab.evaluate("document.querySelector('[data-tokens]').click()")
    turns = ["prompt, 1 token", "turn 1, trained in another sequence, 1 token", "environment, 1 token"]
    turns += ["turn 2, not trained: forced, 2 tokens, 1 tool call", "environment, 1 token", "turn 3, 1 token"]
    assert texts(tab, ".turn small") == [*turns, "prompt, 1 token", "turn 1, 1 token", "environment, 5 tokens"]
    assert "sequence 2 of 2" in texts(tab, "h3") and texts(tab, ".token.tool") == said[3:5]


def test_what_a_model_writes_stays_text(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=1)
    write_dump(
        folder,
        1,
        [rollout(0, ATTACK, content=[ATTACK, ATTACK], prompt_id=ATTACK, environment=ATTACK, finish_reason=ATTACK)],
    )
    open_report(tab, folder)
    tab.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    tab.wait("document.querySelector('.card pre')")
    assert texts(tab, ".card pre") == [ATTACK] and texts(tab, ".prompt") == [ATTACK]
    assert tab.evaluate("window.owned === undefined && document.querySelectorAll('main img, main script').length === 0")
    assert tab.errors == [] and len(tab.requests) == 1


def test_a_script_that_enters_the_page_does_not_run(tab: Tab, tmp_path: Path):
    """The second wall: the page's security policy, should a text ever become markup."""
    open_report(tab, make_run(tmp_path / "run"))
    tab.evaluate(
        "(() => { document.querySelector('main').innerHTML = '<img src=https://example.com/x "
        "onerror=window.owned=1>'; })()"
    )
    tab.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.owned=1'; "
        "document.body.append(s); })()"
    )
    assert tab.evaluate("new Promise((done) => setTimeout(() => done(window.owned === undefined), 300))")
    assert any("Content Security Policy" in error for error in tab.errors)


def test_the_live_view_follows_a_run_and_lays_runs_over_each_other(tab: Tab, live: str, tmp_path: Path):
    tab.requests.clear()
    tab.open(live)
    tab.wait("document.querySelector('.chart canvas')")
    assert "one train/reward" in texts(tab, ".chart .u-label") and "two train/reward" in texts(tab, ".chart .u-label")
    assert "5 of 50" in texts(tab, "dd")
    write_metrics(tmp_path / "one", [row(step) for step in range(1, 13)])
    tab.wait("[...document.querySelectorAll('dd')].some((e) => e.textContent === '12 of 50')")
    tab.evaluate("document.querySelector('[data-tab=rollouts]').click()")
    tab.wait("document.querySelectorAll('.card').length === 8")
    choose(tab, "step", "train_data_step2")
    tab.wait("document.querySelector('.card pre')?.textContent === 'answer 0 of step 2'")
    choose(tab, "run", "1")
    tab.evaluate("document.querySelector('[data-tab=timeline]').click()")
    choose(tab, "step", "5")
    tab.wait("document.querySelectorAll('.lane:not(.ticks) .bar').length === 7")
    assert {request.split("?")[0].removeprefix(live).split("/")[0] for request in tab.requests} <= {
        "",
        "data",
        "rollouts",
        "timeline",
        "favicon.ico",
    }
    assert f"{live}timeline/1/5" in tab.requests


def test_a_zoom_outlives_what_a_live_page_learns(tab: Tab, live: str, tmp_path: Path):
    tab.open(live)
    tab.wait("document.querySelector('.chart canvas')")
    tab.evaluate("charts[0][0].setScale('x', { min: 2, max: 4 })")
    write_metrics(tmp_path / "one", [row(step) for step in range(1, 13)])
    tab.wait("[...document.querySelectorAll('dd')].some((e) => e.textContent === '12 of 50')")
    tab.wait("charts.length && charts[0][0].scales.x.min === 2 && charts[0][0].scales.x.max === 4")
    tab.evaluate("charts[0][0].over.dispatchEvent(new MouseEvent('dblclick'))")
    tab.wait("state.zoom === null && charts[0][0].scales.x.max === 12")


def test_a_timeline_tells_who_works_and_who_waits(tab: Tab, tmp_path: Path):
    open_report(tab, make_run(tmp_path / "run"))
    tab.evaluate("document.querySelector('[data-tab=timeline]').click()")
    assert texts(tab, ".lanes .lane:not(.ticks) > small") == [
        "driver",
        "policy rank 0",
        "policy rank 1",
        "engine 0",
        "rewards: math worker 0",
    ]
    assert texts(tab, ".lane:nth-child(2) .bar") == ["step", "generation", "wait: train_step"] and texts(
        tab, ".bar.waits"
    ) == ["wait: train_step"]
    tab.move_to(".lane:nth-child(4) .bar")
    tab.wait("document.querySelector('.tip').textContent.startsWith('policy rank 1: train_step')")
    assert texts(tab, ".tip") == [
        (
            "policy rank 1: train_step, 250 ms from 600 ms on · phase train · host bytes 1 GB · gpu peak bytes 1 GB · "
            "gpu used bytes 3 GB"
        )
    ]
    # The newest step lasts as long as what was recorded of it; its engine works for a half of that.
    assert [row for row in texts(tab, "main > div > table tbody tr") if row.startswith("engine")] == [
        "engine 0450 ms50 %450 ms"
    ]
    choose(tab, "step", "2")
    tab.evaluate("timed.zoom = [0, 100000]; draw()")
    assert texts(tab, ".lane:not(.ticks) .bar") == ["step", "generation", "generate"]
    found = tab.evaluate("traceOf(2, run().timelines[2])")
    assert isinstance(found,
                      dict) and {(event["name"],
                                  event["ts"]) for event in found["traceEvents"] if event["ph"] == "X"} >= {
        ("train_step", 2_600_000), ("score", 2_300_000)}  # fmt: skip
    tab.evaluate("save(2, run().timelines[2])")
    assert tab.errors == [] and len([request for request in tab.requests if not request.startswith("blob:")]) == 1


def test_the_schedule_of_a_refit_is_a_matrix(tab: Tab, tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_metrics(
        folder,
        [row(step, refit__seconds=0.1, refit__verified_bytes=4000, refit__weight_version=step) for step in range(1, 6)],
    )
    open_report(tab, folder)
    tab.evaluate("document.querySelector('[data-tab=weights]').click()")
    assert texts(tab, ".matrix td") == ["2 kB", "", "1 kB", "1 kB"]
    tones = [
        tab.evaluate(f"getComputedStyle(document.querySelectorAll('.matrix td')[{index}]).backgroundColor")
        for index in range(3)
    ]
    assert len(set(tones)) == 3 and tones[1] == "rgba(37, 99, 235, 0)"
    text = str(tab.evaluate("document.querySelector('main').textContent"))
    assert (
        "3 kB from a worker's own device, 1 kB from other devices of its node, 0 B from other nodes" in text
        and "4 kB stayed as they were" in text
    )


def test_every_tab_of_a_page_of_a_thousand_steps_is_drawn(tab: Tab, tmp_path: Path):
    open_report(tab, make_long_run(tmp_path / "run"))
    assert draw_all_tabs(tab) == ["Overview", "Rollouts", "Timeline", "Resources"] and tab.errors == []
