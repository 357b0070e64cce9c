from mrl.data.chat import ChatFormat
from mrl.data.conversations import Conversation, ConversationFormat, TokenSequence, tokenize, with_prompts
from mrl.recipes.tokenizer import byte_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message.role + '\n' + message.content + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)
# NeMo RL's sft.yaml has one like this: no special token, nothing before an answer.
BARE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ 'Q: ' + message.content + ' A:' }}"
    "{% else %}{{ ' ' + message.content }}{% endif %}{% endfor %}"
)
# As Qwen3's, which drops the reasoning of earlier turns.
REWRITING = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '[thought]' }}{% endif %}{{ message.content }}{% endfor %}"
)
TURNS = (("user", "2+2="), ("assistant", "4"), ("user", "and 3+3="), ("assistant", "six"))


def learned(*turns: tuple[str, str], template: str | None = None, **settings: object) -> tuple[str, list[str]]:
    """The text of a conversation's tokens, and of each part that is learned."""
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = template or tokenizer.chat_template
    how = dict(add_bos=False, add_eos=True, add_generation_prompt=True, only_unmask_final=False, template_kwargs={}) | settings
    conversation = Conversation(tuple({"role": role, "content": content} for role, content in turns))
    (found,) = tokenize([conversation], tokenizer, ConversationFormat(**how))  # type: ignore[arg-type]  # fields by name
    assert isinstance(found, TokenSequence), found
    ids = found.token_ids.tolist()
    return str(tokenizer.decode(ids)), [str(tokenizer.decode(ids[start:stop])) for start, stop in found.targets]


def test_every_answer_is_learned_with_its_end():
    text, parts = learned(*TURNS)
    assert text == "<|user|>2+2=<|assistant|>4<|end|><|user|>and 3+3=<|assistant|>six<|end|>"
    assert parts == ["4<|end|>", "six<|end|>"]


def test_the_last_answer_alone():
    text, parts = learned(*TURNS, only_unmask_final=True)
    assert text == "<|user|>2+2=<|assistant|>4<|end|><|user|>and 3+3=<|assistant|>six<|end|>"
    assert parts == ["six<|end|>"]


def test_what_asks_for_an_answer_is_learned_unless_it_belongs_to_the_question():
    assert learned(*TURNS, add_generation_prompt=False)[1] == ["<|assistant|>4<|end|>", "<|assistant|>six<|end|>"]
    assert learned(*TURNS, template=CHATML, add_generation_prompt=False)[1] == [
        "<|user|>assistant\n4<|end|>\n",
        "<|user|>assistant\nsix<|end|>\n",
    ]


def test_a_template_with_a_line_break_behind_the_end_gets_no_second_end():
    assert learned(*TURNS, template=CHATML)[1] == ["4<|end|>\n", "six<|end|>\n"]


def test_a_template_without_special_tokens_gets_an_end_and_a_beginning():
    text, parts = learned(*TURNS[:2], template=BARE, add_bos=True)
    assert (text, parts) == ("<|begin|>Q: 2+2= A: 4<|end|>", [" 4<|end|>"])
    assert learned(*TURNS[:2], template=BARE, add_eos=False) == ("Q: 2+2= A: 4", [" 4"])
    assert learned(*TURNS[:2], template="<|begin|>" + BARE, add_bos=True)[0] == "<|begin|>Q: 2+2= A: 4<|end|>"


def test_what_follows_the_last_answer_is_left_out():
    assert learned(*TURNS[:3]) == ("<|user|>2+2=<|assistant|>4<|end|>", ["4<|end|>"])


def test_nothing_predicts_the_first_token():
    text, parts = learned(("assistant", "hello"), add_generation_prompt=False)
    assert (text, parts) == ("<|assistant|>hello<|end|>", ["hello<|end|>"])


def test_a_template_that_rewrites_earlier_turns_can_only_teach_the_last():
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = REWRITING
    conversation = Conversation(tuple({"role": role, "content": content} for role, content in TURNS))
    how = ConversationFormat(False, True, True, False, {})
    (problem,) = tokenize([conversation], tokenizer, how)
    assert isinstance(problem, str) and "only_unmask_final" in problem
    assert learned(*TURNS, template=REWRITING, only_unmask_final=True, add_eos=False)[1] == ["<|assistant|>[thought]six"]


def test_a_template_that_raises_is_told_with_its_words():
    (problem,) = tokenize(
        [Conversation(({"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}))],
        byte_tokenizer(4096),
        ConversationFormat(False, True, True, False, {}),
    )
    assert isinstance(problem, str) and "unknown role tool" in problem


def test_prompt_files_apply_to_the_first_question():
    chat = ChatFormat(prompt="Add: {}", system_prompt="Be brief.")
    turns = tuple({"role": role, "content": content} for role, content in TURNS)
    prompted = with_prompts(Conversation(turns), chat).messages
    assert [message["content"] for message in prompted] == ["Be brief.", "Add: 2+2=", "4", "and 3+3=", "six"]
    own = ({"role": "system", "content": "Own."}, *turns)
    assert with_prompts(Conversation(own), chat).messages[0]["content"] == "Own."
