# SPDX-License-Identifier: Apache-2.0
"""Rules of the models' tokens: all models share one tokenizer, and each embedding has all of its tokens."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from conversion.files.reading import read_json
from mrl.config.errors import Problems, prefix_of
from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName, role_of

SHOWN = 3


def check_vocabulary(config: RunConfig, problems: Problems) -> None:
    """Checks that the policy has an embedding for each token of its tokenizer, as far as the files are here."""
    name = config.policy.tokenizer.name
    try:
        if rule := beyond_vocabulary(config, num_tokens(Path(name))):
            problems.tell("policy.tokenizer.name", name, rule)
    except ValueError as error:
        problems.tell("policy.tokenizer.name", name, error)


def beyond_vocabulary(config: RunConfig, needed: int) -> str:
    """Describes tokens of the tokenizer beyond the policy's embedding; "" if there are none, or that is unknown."""
    columns = vocabulary_size(Path(config.policy.model_name))
    if not 0 < columns < needed:
        return ""
    rule = f"it has {needed:,} tokens, and vocab_size of policy.model_name={config.policy.model_name} is {columns:,}"
    way_out = "take the model's own tokenizer, or enlarge its embedding (resize_token_embeddings of transformers)"
    return f"{rule}: the others could not be trained; {way_out}"


def num_choices(config: RunConfig) -> int:
    """Number of tokens the policy draws from: those of its tokenizer, as rounded-up embeddings have rows without text.

    0: no file has the number.
    """
    return num_tokens(Path(config.policy.tokenizer.name))


def check_tokens(config: RunConfig, model: ModelName, problems: Problems) -> None:
    """Checks, as far as the files are here, that another model reads the policy's tokens and has an embedding for each.

    A teacher's embedding may have more rows: it chooses among the student's tokens.
    """
    given, is_teacher = config.model(model), role_of(model) == "teacher"
    folder, tokenizer = Path(given.model_name), Path(config.policy.tokenizer.name)
    # A critic uses the policy's tokenizer.
    own = Path(given.tokenizer.name) if is_teacher else folder
    try:
        difference, needed = token_difference(tokenizer, own), num_tokens(tokenizer)
    except ValueError as error:
        problems.tell(f"{prefix_of(model)}tokenizer.name", own, error)
        return
    columns, student = vocabulary_size(folder), vocabulary_size(Path(config.policy.model_name))
    key, named, size = f"{prefix_of(model)}model_name", folder, f"its vocab_size is {columns:,}"
    read, way_out = f"policy.tokenizer.name={tokenizer}", "take a model of that tokenizer"
    if difference:
        if is_teacher:
            key, named = f"{prefix_of(model)}tokenizer.name", own
        problems.tell(key, named, f"its tokens are not those of {read}: {difference}", way_out)
    elif 0 < columns < needed:
        problems.tell(key, named, f"{size}, and {read} has {needed:,} tokens", way_out)
    elif is_teacher and 0 < columns < student:
        rule = (
            f"{size}, and the student's {student:,}: the student may draw tokens of which the teacher has no embedding"
        )
        problems.tell(key, named, rule, "take a teacher of that size or more, or a smaller student")
    elif is_teacher and 0 < student < columns and difference is None:
        missing = "cannot be checked without tokenizer.json of both: whether their tokens are the same"
        problems.tell(key, named, f"{size}, and the student's {student:,}", missing, "not checked")
    if is_teacher and 0 < (student or columns) < config.num_taught_logits:
        problems.add(
            "distillation.topk_logits_k", f"the vocabulary has {student or columns:,} tokens", "use that number or less"
        )


def token_difference(student: Path, teacher: Path) -> str | None:
    """Describes how two tokenizers' tokens differ, by their files; "" if equal, None without a common kind of file."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    for name in names:
        ours, theirs = student / name, teacher / name
        if not (ours.is_file() and theirs.is_file()):
            continue
        if ours.read_bytes() == theirs.read_bytes():
            return ""
        if name == "tokenizer.model":
            return "the files tokenizer.model differ"
        mine, other = _tokens(ours), _tokens(theirs)
        different = [token for token in mine | other if mine.get(token) != other.get(token)]
        shown = ", ".join(
            f"{json.dumps(token)} is {mine.get(token, 'none')} and {other.get(token, 'none')}"
            for token in different[:SHOWN]
        )
        return f"{len(different):,} of {len(mine | other):,} have other ids, such as {shown}" if different else ""
    return None


def num_tokens(tokenizer: Path) -> int:
    """One more than the largest id of a tokenizer, by its files; 0 if none of those that can be read is here."""
    for name in ("tokenizer.json", "vocab.json"):
        if (tokenizer / name).is_file():
            return 1 + max([*_tokens(tokenizer / name).values(), *_added_ids(tokenizer)], default=-1)
    return 0


def _tokens(path: Path) -> dict[str, int]:
    """Tokens and their ids, by tokenizer.json or vocab.json. ValueError: nothing can be read there."""
    try:
        return _ids(read_json(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path.name} cannot be read as a list of tokens: {error!r:.200}; download it again"
        ) from error


def _added_ids(tokenizer: Path) -> list[int]:
    """Ids of tokens that older files add to those of tokenizer.json and vocab.json."""
    paths = [tokenizer / name for name in ("tokenizer_config.json", "added_tokens.json")]
    settings, added = (read_json(path) if path.is_file() else {} for path in paths)
    decoder = settings.get("added_tokens_decoder") if isinstance(settings, dict) else None
    values = list(added.values()) if isinstance(added, dict) else []
    return [int(str(token_id)) for token_id in [*(decoder if isinstance(decoder, dict) else {}), *values]]


def _ids(tokenizer: object) -> dict[str, int]:
    if not isinstance(tokenizer, dict):
        return {}
    model = tokenizer.get("model", {"vocab": tokenizer})
    vocabulary = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(vocabulary, list):  # pairs with scores, in the order of ids
        vocabulary = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    added = tokenizer.get("added_tokens", [])
    return vocabulary | {str(token["content"]): int(token["id"]) for token in added if isinstance(token, dict)}


def vocabulary_size(folder: Path) -> int:
    """The vocab_size of a folder's config.json; 0 if it says none, or is not here."""
    with suppress(OSError, ValueError):
        found = read_json(folder / "config.json")
        return int(str(found.get("vocab_size", 0))) if isinstance(found, dict) else 0
    return 0
