# SPDX-License-Identifier: Apache-2.0
import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from mrl.config.errors import ConfigError
from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.data.prompts import PromptLimits, load_prompts
from mrl.recipes.tokenizer import byte_tokenizer

EOS = 258


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run on two training rows and three validation rows; prompts are 3 bytes and 2 markers, contexts 32 tokens."""
    byte_tokenizer(4096).save_pretrained(tmp_path / "model")
    write(
        tmp_path / "train.jsonl",
        [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4", "id": "own", "level": [1]}],
    )
    write(tmp_path / "validation.jsonl", [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(3)])
    return configured(tmp_path)


def configured(folder: Path, *overrides: str) -> RunConfig:
    """The tiny config on the files of `folder`."""
    return load_config(
        "grpo_tiny.yaml",
        [
            "grpo.max_val_samples=2",
            f"policy.model_name={folder / 'model'}",
            "policy.generation.vllm_cfg.max_model_len=32",
            f"data.train.data_path={folder / 'train.jsonl'}",
            f"data.validation.data_path={folder / 'validation.jsonl'}",
            *overrides,
        ],
    )


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_a_run_asks(config: RunConfig):
    data = load_prompts(config)
    assert [(prompt.prompt_id, prompt.text, prompt.expected_answer, prompt.env_name) for prompt in data.train] == [
        ("train:1", "1+1", "2", "math"),
        ("own", "2+2", "4", "math"),
    ]
    assert [prompt.row for prompt in data.train] == ["{}", '{"level": [1]}']
    assert data.train[0].token_ids[1:-1] == tuple(b"1+1")
    assert [prompt.prompt_id for prompt in data.validation] == ["validation:1", "validation:2"]
    assert data.pad_token_id == 256
    sampling = data.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (1.0, 1.0, None, 16)
    assert sampling.stop_token_ids == (EOS,)


def test_an_agent_gets_the_fields_of_its_row_by_their_own_names(config: RunConfig, tmp_path: Path):
    row = {"question": "1+1", "total": 2, "customer": "c0"}
    write(tmp_path / "train.jsonl", [row])
    settings = ["data.default.env_name=shop", "data.default.output_key=total", "data.validation=null"]
    ((prompt),) = load_prompts(configured(tmp_path, *settings, "++env.remote.shop=http://127.0.0.1:1/run")).train
    assert json.loads(prompt.row) == row and (prompt.text, prompt.expected_answer) == ("1+1", "2")


def test_without_validation_there_are_no_validation_prompts(config: RunConfig):
    config.data.validation = None
    assert list(load_prompts(config).validation) == []


def test_stop_tokens_of_tokenizer_and_generation_config(config: RunConfig):
    file = Path(config.policy.model_name) / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [11, EOS]}))
    assert load_prompts(config).sampling.stop_token_ids == (11, EOS)
    file.write_text(json.dumps({"eos_token_id": 2}))
    assert load_prompts(config).sampling.stop_token_ids == (2, EOS)
    file.write_text('{"eos_token_id": 2')
    with pytest.raises(
        ValueError, match=rf"{file} is not readable JSON: .*it must be a model's generation_config.json"
    ):
        load_prompts(config)
    config.policy.generation.stop_token_ids = [7]
    assert load_prompts(config).sampling.stop_token_ids == (7,)


def test_rows_that_are_too_long_are_all_named(config: RunConfig):
    path = Path(config.data.train.source)
    write(path, [{"question": "1" * length, "answer": "2"} for length in (14, 15, 3, 99)])
    with pytest.raises(ValueError) as caught:
        load_prompts(config)
    message = str(caught.value)
    assert message.startswith(f"data.train.data_path={path} has 2 bad rows")
    assert f"{path}:2: the prompt has 17 tokens; policy.generation.vllm_cfg.max_model_len=32 less 16 " in message
    assert f"{path}:4: the prompt has 101 tokens" in message
    config.data.max_input_seq_length = 15
    with pytest.raises(ValueError, match="data.max_input_seq_length allows 15") as caught:
        load_prompts(config)
    assert "has 3 bad rows" in str(caught.value)


def test_rows_beyond_max_val_samples_are_checked_too(config: RunConfig):
    assert config.data.validation is not None
    path = Path(config.data.validation.source)
    path.write_text(path.read_text() + "bad\n")
    with pytest.raises(ValueError, match=r"data.validation.data_path=.*\n.*validation.jsonl:4: invalid JSON"):
        load_prompts(config)


def test_unknown_environment_of_a_row(config: RunConfig):
    write(Path(config.data.train.source), [{"question": "1+1", "answer": "2", "env_name": "maths"}])
    with pytest.raises(
        ValueError, match=r"1 of 1 rows \(100.0%\) ask for environments that are not there \(maths: 1 row\)"
    ):
        load_prompts(config)


def test_a_rollout_as_long_as_the_context_takes_what_the_prompt_leaves():
    limits = PromptLimits(max_input_length=None, context_length=32, max_new_tokens=32)
    assert limits.reason_against(31) is None
    assert "less 1 for the rollout" in str(limits.reason_against(32))
    assert replace(limits, max_new_tokens=31).reason_against(1) is None
    assert replace(limits, max_new_tokens=31).reason_against(2) is not None


def test_rows_need_the_answer_that_their_environment_compares_with(config: RunConfig):
    write(Path(config.data.train.source), [{"question": "1+1", "solution": "2"}])
    with pytest.raises(ValueError, match="train.jsonl:1: no key expected_answer or answer or output"):
        load_prompts(config)


def test_what_an_agent_does_is_judged_by_its_environment(config: RunConfig, tmp_path: Path):
    def row(agent: str | None) -> dict[str, object]:
        request = {"input": [{"role": "user", "content": "1+1"}]}
        return {
            "responses_create_params": request,
            "expected_answer": "2",
            "agent_ref": {"name": agent},
            "dataset": "d",
            "id": 1,
        }

    path = tmp_path / "train.jsonl"
    write(path, [row("math_with_judge_simple_agent"), row("math_with_judge_simple_agent")])
    gym = ["data.default.env_name=nemo_gym", "data.default.processor=nemo_gym_data_processor", "data.validation=null"]
    prompts = load_prompts(configured(tmp_path, *gym)).train
    assert [(prompt.prompt_id, prompt.env_name, prompt.expected_answer) for prompt in prompts] == [
        ("train:1", "math", "2"),
        ("train:2", "math", "2"),
    ]
    assert json.loads(prompts[0].row) == {
        "agent_ref": {"name": "math_with_judge_simple_agent"}, "dataset": "d", "id": 1, "expected_answer": "2",
    }  # fmt: skip
    write(path, [row("chess_simple_agent"), row("math_with_judge_simple_agent")])
    with pytest.raises(ValueError, match=r"1 of 2 rows .*\(chess_simple_agent: 1 row\)"):
        load_prompts(configured(tmp_path, *gym))
    prompts = load_prompts(configured(tmp_path, *gym, "data.drop_rows_without_environment=true")).train
    assert [prompt.prompt_id for prompt in prompts] == ["train:2"]
    write(path, [row(None)])
    with pytest.raises(ValueError, match="train.jsonl:1: no agent_ref.name, by which env_name=nemo_gym chooses"):
        load_prompts(configured(tmp_path, *gym))
    # Servers get rows as they are, also those whose agent makes the question.
    swe = {
        "responses_create_params": {"input": [], "metadata": {"instance_id": "x"}},
        "agent_ref": {"name": "swe_agents"},
    }
    served = [row("chess_simple_agent"), row("math_with_judge_simple_agent"), swe]
    write(path, served)
    with pytest.raises(ValueError, match=r"train.jsonl:3: .*input must be a text or a list of messages, not empty"):
        load_prompts(configured(tmp_path, *gym, "env.should_use_nemo_gym=true"))
    prompts = load_prompts(
        configured(tmp_path, *gym, "env.should_use_nemo_gym=true", "env.nemo_gym.command=ng_run")
    ).train
    assert [prompt.env_name for prompt in prompts] == ["chess_simple_agent", "math", "swe_agents"]
    assert [json.loads(prompts[index].row) for index in (0, 2)] == [served[0], swe] and prompts[2].token_ids


THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def requested(**request: object) -> dict[str, object]:
    asked = {"input": "1+1", **request}
    return {
        "responses_create_params": asked,
        "expected_answer": "2",
        "agent_ref": {"name": "math_with_judge_simple_agent"},
    }


OFF = {"enable_thinking": False}
ASKED = {"question": "1+1", "answer": "2"}


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        (ASKED, "<|assistant|>"),
        (ASKED | {"chat_template_kwargs": OFF}, "<think></think>"),
        (ASKED | {"chat_template_kwargs": json.dumps(OFF)}, "<think></think>"),
        (ASKED | {"enable_thinking": False, "reasoning_effort": "low"}, "<think></think>"),
        (requested(metadata={"chat_template_kwargs": json.dumps(OFF), "source": "x"}), "<think></think>"),
        (requested(metadata={"extra_body": json.dumps({"chat_template_kwargs": OFF})}), "<think></think>"),
        (requested(temperature=1, top_p=1.0, max_output_tokens=64, tool_choice="auto", model="m"), "<|assistant|>"),
        (ASKED | {"apply_chat_template_kwargs": OFF}, "<think></think>"),
        (ASKED | {"template_kwargs": json.dumps(OFF), "extra_body": None}, "<think></think>"),
        (ASKED | {"extra_body": {"chat_template_kwargs": OFF}}, "<think></think>"),
        (ASKED | {"extra_body": {"top_k": 20}},
         "extra_body.top_k has no effect here: all rollouts are sampled by policy.generation"),
        (ASKED | {"sampling_params": {"temperature": 0.1}}, "sampling_params has no effect here"),
        (ASKED | {"chat_template_args": {"effort": 1}}, "chat_template_kwargs.effort: the chat template has no such"),
        (ASKED | {"chat_template_kwargs": {"effort": 1}}, "chat_template_kwargs.effort: the chat template has no such"),
        (ASKED | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: the chat template has no such"),
        (ASKED | {"chat_template_kwargs": "off"}, "chat_template_kwargs is a text that is not JSON"),
        (ASKED | {"chat_template_kwargs": [1]}, "must be an object, or one as JSON text, not list"),
        ({"messages": [{"role": "user", "content": "q", "prefix": True}], "answer": "2"}, "has prefix=true: rollouts"),
        (requested(metadata={"extra_body": json.dumps({"seed": 1})}),
         "metadata.extra_body.seed of the request has no effect here"),
        (requested(metadata={"audio_path": "a.wav"}), "metadata.audio_path of the request has no effect here"),
        (requested(temperature=0.6),
         "temperature=0.6, and rollouts policy.generation.temperature=1.0; remove it, or set that"),
        (requested(max_output_tokens=4),
         "max_output_tokens=4, and rollouts may have policy.generation.max_new_tokens=16"),
        (requested(reasoning={"effort": "low"}), "reasoning of the request has no effect here"),
        (requested(text={"format": {"type": "json_schema"}}), "text of the request has no effect here"),
        (requested(stop=["x"]), "stop of the request has no effect here"),
    ],
)  # fmt: skip
def test_what_rows_ask_of_the_template_and_the_engine(
    config: RunConfig, tmp_path: Path, row: dict[str, object], outcome: str
):
    (tmp_path / "t.jinja").write_text(THINKS)
    write(tmp_path / "train.jsonl", [row])
    overrides = [f"policy.tokenizer.chat_template={tmp_path}/t.jinja", "data.validation=null"]
    overrides += ["policy.generation.vllm_cfg.max_model_len=64"]
    overrides += ["env.should_use_nemo_gym=true"] if "responses_create_params" in row else []
    if outcome.startswith("<"):
        (prompt,) = load_prompts(configured(tmp_path, *overrides)).train
        assert bytes(id for id in prompt.token_ids if id < 256).decode() == ("1+1" + outcome).removesuffix(
            "<|assistant|>"
        )
        assert json.loads(prompt.template_kwargs or "{}") == ({} if outcome == "<|assistant|>" else OFF)
        return
    with pytest.raises(ValueError, match=re.escape(outcome)):
        load_prompts(configured(tmp_path, *overrides))


def test_a_row_is_taught_by_the_teacher_of_its_agent_or_else_of_its_environment(config: RunConfig, tmp_path: Path):
    names = "{adding: one, math: two}"
    opd = [
        "grpo.adv_estimator.name=opd",
        f"on_policy_distillation={{enabled: true, teacher_model_by_agent_name: {names}}}",
    ]
    rows = [
        {"question": "1+1", "answer": "2", "env_name": "math", "agent_ref": {"name": name}}
        for name in ("adding", "math", "art")
    ]
    write(tmp_path / "train.jsonl", [*rows[:2], {"question": "2+2", "answer": "4"}])
    data = load_prompts(configured(tmp_path, *opd))
    assert [prompt.teacher for prompt in data.train] == ["teacher:adding", "teacher:math", "teacher:math"]
    assert [prompt.teacher for prompt in data.validation] == ["", ""]
    assert [prompt.teacher for prompt in load_prompts(configured(tmp_path)).train] == ["", "", ""]
    write(tmp_path / "train.jsonl", rows)
    with pytest.raises(
        ValueError, match=r"train.jsonl:3: no teacher: art is not in on_policy_distillation.teacher_model_by_agent_name"
    ):
        load_prompts(configured(tmp_path, *opd))


def test_tools_go_with_the_prompt(config: RunConfig, tmp_path: Path):
    tool = {"type": "function", "function": {"name": "add"}}
    write(
        tmp_path / "train.jsonl", [{"messages": [{"role": "user", "content": "1+1"}], "answer": "2", "tools": [tool]}]
    )
    (prompt,) = load_prompts(config).train
    assert json.loads(prompt.row) == {"tools": [tool]}


def test_several_data_sets_each_in_its_own_way(config: RunConfig, tmp_path: Path):
    (tmp_path / "twice.txt").write_text("{}!")
    write(tmp_path / "other.jsonl", [{"q": "3+3", "a": "6"}])
    sets = (
        f"[{{data_path: {tmp_path}/train.jsonl}}, {{data_path: {tmp_path}/other.jsonl, input_key: q, "
        f"output_key: a, prompt_file: null}}]"
    )
    # The last set says null, the first follows data.default.
    config = configured(tmp_path, f"data.train.datasets={sets}", f"data.default.prompt_file={tmp_path}/twice.txt")
    assert [bytes(prompt.token_ids[1:-1]) for prompt in load_prompts(config).train] == [b"1+1!", b"2+2!", b"3+3"]


def test_validation_rows_held_out_of_training_rows(config: RunConfig, tmp_path: Path):
    write(tmp_path / "train.jsonl", [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(9)])
    for size, num_held in (("0.3", 3), ("4", 4)):
        data = load_prompts(
            configured(
                tmp_path, f"data.train.split_validation_size={size}", "data.validation=null", "grpo.max_val_samples=100"
            )
        )
        assert len(data.validation) == num_held
        ids = [prompt.prompt_id for prompt in (*data.train, *data.validation)]
        assert sorted(ids) == [f"train:{line}" for line in range(1, 10)]
    # Of some of the rows.
    few = load_prompts(
        configured(tmp_path, "data.train={max_samples: 5, split_validation_size: 2}", "data.validation=null")
    )
    assert (len(few.train), len(few.validation)) == (3, 2)
    # Rows of their own come after those.
    both = load_prompts(configured(tmp_path, "data.train.split_validation_size=1", "grpo.max_val_samples=3"))
    assert [prompt.prompt_id.split(":")[0] for prompt in both.validation] == ["train", "validation", "validation"]


@pytest.mark.parametrize(("question", "num_tokens"), [("hello world hello world hello world", 1), ("\ufdfa\ufdfa", 36)])
def test_long_rows_are_counted_in_tokens_not_in_bytes(
    config: RunConfig, tmp_path: Path, question: str, num_tokens: int
):
    """A tokenizer that normalises, and merges: 35 bytes are one token; 6 bytes, two signs for 18 each, are 36."""
    words = {
        character: index for index, character in enumerate({*"hello world", *unicodedata.normalize("NFKC", "\ufdfa")})
    }
    inner = Tokenizer(
        models.WordPiece({**words, **{f"##{word}": len(words) + index for word, index in words.items()}}, unk_token="h")
    )
    inner.add_tokens(["hello world hello world hello world"])
    inner.normalizer = normalizers.NFKC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template="{{ messages[0].content }}")
    tokenizer.save_pretrained(tmp_path / "model")
    write(tmp_path / "train.jsonl", [{"question": question, "answer": "2"}])
    limited = configured(
        tmp_path, "data.max_input_seq_length=34", "policy.generation.vllm_cfg.max_model_len=64", "data.validation=null"
    )
    if num_tokens > 34:
        with pytest.raises(
            ValueError, match=f"the prompt has {num_tokens} tokens, data.max_input_seq_length allows 34"
        ):
            load_prompts(limited)
    else:
        assert len(load_prompts(limited).train[0].token_ids) == num_tokens


@pytest.mark.parametrize("truth", [{"target": ["Bob"]}, None])
def test_what_only_a_function_of_ones_own_can_judge_is_refused_by_others(
    config: RunConfig, tmp_path: Path, truth: object
):
    write(
        tmp_path / "train.jsonl",
        [{"prompt": [{"role": "user", "content": "Who?"}], "reward_model": {"ground_truth": truth}}] * 3,
    )
    with pytest.raises(
        ValueError, match=f"reward_model.ground_truth is {type(truth).__name__}, .* or use env.own.functions"
    ):
        load_prompts(configured(tmp_path))
    own = configured(
        tmp_path, "data.default.env_name=mine", "++env.own.functions.mine=tests.unit.envs.test_own:of_verl"
    )
    assert len(load_prompts(own).train) == 3


def test_questions_that_a_data_set_repeats_are_asked_once(config: RunConfig, tmp_path: Path):
    def row(question: str, index: int) -> dict[str, object]:
        prompt = [{"role": "user", "content": question}]
        return {"prompt": prompt, "reward_model": {"ground_truth": "2"}, "extra_info": {"index": index}}

    write(tmp_path / "train.jsonl", [row("1+1", 0), row("0+2", 1), row("1+1", 2)])
    assert [
        prompt.text for prompt in load_prompts(configured(tmp_path, "data.train.dataset_name=DAPOMath17K")).train
    ] == ["1+1", "0+2"]
    assert len(load_prompts(config).train) == 3


def test_a_misspelt_parameter_of_a_reward_is_said_once_and_before_the_rows(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "misspelt.py").write_text("def mine(response, anwser): ...\ndef other(response, levle): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("train", "validation"):
        rows = [{"question": f"{i}+1", "answer": "2", "level": 1, "env_name": "ab"[i % 2]} for i in range(9)]
        write(tmp_path / f"{name}.jsonl", rows)
    words = ["++env.own.functions.a=misspelt:mine", "++env.own.functions.b=misspelt:other"]
    with pytest.raises(ConfigError) as caught:
        load_prompts(configured(tmp_path, *words))
    said = str(caught.value).splitlines()
    assert [line.partition("; rename")[0] for line in said] == [
        f"env.own.functions.{name}=misspelt:{function}: it takes {wrong}, which is no value of mrl and no column of "
        f"data.train and data.validation; the nearest is {right}"
        for name, function, wrong, right in (("a", "mine", "anwser", "answer"), ("b", "other", "levle", "level"))
    ]


def test_a_reward_s_parameter_is_a_column_of_every_row(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "rewards_of_rows.py").write_text(
        "def graded(response, level, solution): ...\ndef ungraded(response, level=1): ..."
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    write(
        tmp_path / "train.jsonl", [{"question": "1+1", "answer": "2", "level": 1}, {"question": "2+2", "answer": "4"}]
    )
    common = ["data.validation=null", "data.default.env_name=mine"]
    with pytest.raises(
        ValueError,
        match=r"train.jsonl:2: .*graded takes level, and the row has no such column; .* it has none; complete",
    ):
        load_prompts(configured(tmp_path, *common, "++env.own.functions.mine=rewards_of_rows:graded"))
    assert (
        len(load_prompts(configured(tmp_path, *common, "++env.own.functions.mine=rewards_of_rows:ungraded")).train) == 2
    )
    write(tmp_path / "train.jsonl", [{"question": "1+1", "level": 1}])
    with pytest.raises(
        ValueError, match="graded takes solution, and the row has no such column, and no answer; .*output_key"
    ):
        load_prompts(configured(tmp_path, *common, "++env.own.functions.mine=rewards_of_rows:graded"))
