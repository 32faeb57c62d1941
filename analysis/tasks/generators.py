"""Tasks with known answers: repeated tokens, indirect object identification, greater-than.

Each is made of token ids alone, which suits any model, or of English where the model's tokenizer has the words as
single tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from analysis.patterns import repeated_tokens as repeated_sequences, start_token
from analysis.tasks.pairs import PromptPairs, pairs_of, single_token
from circuits.arguments import require_model, seeded
from circuits.model import HookedGPT
from circuits.text import Tokenizer
from circuits.validity import require_flag, require_whole

T = TypeVar("T")

NAMES = (
    " Mary John Tom James Dan Sarah Anna Paul Mark Kate Jack Alice Peter Emma Luke Grace Adam Laura Simon Jane"
    " David Susan Robert Lisa Michael Helen"
).split()
PLACES, THINGS = ("store", "park", "school", "office"), ("drink", "book", "ring", "letter")
IOI = (
    "When{A} and{B} went to the {place},{S} gave a {thing} to",
    "Then{A} and{B} had a long talk at the {place}, and{S} gave a {thing} to",
    "After{A} and{B} met at the {place},{S} handed a {thing} to",
)
EVENTS = ("war", "expedition", "siege", "voyage", "strike", "dispute")
YEARS = "The {event} lasted from the year {century}{year:02d} to the year {century}"
CENTURIES = (11, 12, 13, 14, 15, 16, 17, 18)
_LEAST_YEARS = 20


def repeated_tokens(model: HookedGPT, n: int = 8, batch: int = 8, seed: int = 0) -> PromptPairs:
    """Random tokens, then the same again up to the middle: what comes next stands in the first half.

    In the corrupted prompt another token stands there, which is the wrong answer. Start token in front where the model
    has one.

    Raises:
        ValueError: `n` below 2, sequences longer than n_ctx, or a vocabulary too small for `n` different tokens and one
            more.
    """
    require_model(model)
    require_whole("n", n)
    require_whole("batch", batch)
    drawn = repeated_sequences(model, n, batch, seed)
    offset = drawn.shape[1] - 2 * n
    asked = n // 2
    unused = _unused(drawn, model, seed)
    clean = drawn[:, : offset + n + asked]
    corrupt = clean.clone()
    corrupt[:, offset + asked] = unused
    return PromptPairs("repeated tokens", clean, corrupt, drawn[:, offset + asked], unused)


def _unused(drawn: Int[Tensor, "batch pos"], model: HookedGPT, seed: int) -> Int[Tensor, " batch"]:
    """For each row a random token that does not stand in it and does not start texts."""
    free = torch.ones(len(drawn), model.config.d_vocab)
    free.scatter_(1, drawn.cpu(), 0.0)
    start = start_token(model)
    if start is not None:
        free[:, start] = 0.0
    if not bool(free.any(1).all()):
        raise ValueError(f"a vocabulary of {model.config.d_vocab} has no token left that the prompt does not use")
    picked = torch.multinomial(free, 1, generator=seeded(seed))[:, 0]
    return picked.to(drawn.device)


def indirect_object(
    model: HookedGPT, batch: int = 8, seed: int = 0, *, on_tokens: bool = False, length: int = 12
) -> PromptPairs:
    """Indirect object identification (Wang et al. 2022): "When Mary and John went …, John gave a drink to" → " Mary".

    The corrupted prompt names the other person the second time, so the answer is the other name.

    Args:
        model: The model.
        batch: Prompts.
        seed: Seed of the draws.
        on_tokens: Random tokens for names and words, for models without such names: ``… A … B … B …`` → A.
        length: Length of such prompts.

    Raises:
        ValueError: A tokenizer with fewer than two of the names as single tokens, or none at all; prompts too short.
    """
    _check_drawn(model, batch, on_tokens, length)
    generator = seeded(seed)
    if on_tokens:
        return _roles(model, batch, length, generator)
    tokenizer = _tokenizer(model, "indirect_object")
    names = _known_names(tokenizer)
    if len(names) < 2:
        raise ValueError(
            f"{len(names)} of {len(NAMES)} names are single tokens of this tokenizer; on_tokens=True needs no names"
        )
    rows: list[dict[str, Any]] = []
    for _ in range(batch):
        first, second = (names[i] for i in torch.randperm(len(names), generator=generator)[:2].tolist())
        words = {"place": _pick(PLACES, generator), "thing": _pick(THINGS, generator)}
        template, (answer, subject) = _pick(IOI, generator), (first, second)
        if _pick((False, True), generator):
            answer, subject = subject, answer
        prompts = [template.format(A=first, B=second, S=s, **words) for s in (subject, answer)]
        rows.append(_encoded(tokenizer, prompts, answer, subject))
    return pairs_of("indirect object identification", rows, model.device)


def _roles(model: HookedGPT, batch: int, length: int, generator: torch.Generator) -> PromptPairs:
    """``… A … B … B …`` → A, of random tokens that are all different otherwise."""
    start = start_token(model)
    offset = 0 if start is None else 1
    if length < 6 + offset or length > model.config.n_ctx or model.config.d_vocab < length + 1:
        raise ValueError(
            f"such a prompt needs at least {6 + offset} positions, n_ctx ({model.config.n_ctx}) at most, and more "
            f"tokens than positions (there are {model.config.d_vocab}); length is {length}"
        )
    rows = []
    drawable = torch.tensor([token for token in range(model.config.d_vocab) if token != start])
    for _ in range(batch):
        words = drawable[torch.randperm(len(drawable), generator=generator)[: length - offset]].tolist()
        first, second = words[0], words[2]
        again = len(words) - 2  # where one of the two is named again
        clean, corrupt = words.copy(), words.copy()
        clean[again], corrupt[again] = second, first
        front = [] if start is None else [start]
        rows.append({"clean": front + clean, "corrupt": front + corrupt, "correct": first, "wrong": second})
    return pairs_of("indirect object identification on random tokens", rows, model.device)


def greater_than(
    model: HookedGPT, batch: int = 8, seed: int = 0, *, on_tokens: bool = False, length: int = 8
) -> PromptPairs:
    """Greater-than (Hanna et al. 2023): "The war lasted from the year 1732 to the year 17" → a later year.

    The correct answer is a later year, the wrong one an earlier; in the corrupted prompt the first year is the lowest
    that there is, after which both would be right. Only years that the tokenizer cuts behind the century are used.

    Args:
        model: The model.
        batch: Prompts.
        seed: Seed of the draws.
        on_tokens: Token ids for years, in their order, for models without such a tokenizer.
        length: Length of such prompts.

    Raises:
        ValueError: A tokenizer that cuts too few years in two, or none at all; too few tokens.
    """
    _check_drawn(model, batch, on_tokens, length)
    generator = seeded(seed)
    if on_tokens:
        return _ordered(model, batch, length, generator)
    tokenizer = _tokenizer(model, "greater_than")
    known = {century: _years(tokenizer, century) for century in CENTURIES}
    usable = _usable(known)
    if not usable:
        raise ValueError(
            f"this tokenizer cuts {max(map(len, known.values()))} years of a century in two pieces, fewer than "
            f"{_LEAST_YEARS}; on_tokens=True needs no years"
        )
    rows: list[dict[str, Any]] = []
    for _ in range(batch):
        century, event = _pick(usable, generator), _pick(EVENTS, generator)
        years = sorted(known[century])
        at = int(torch.randint(2, len(years) - 1, (1,), generator=generator))
        reach = min(at, len(years) - 1 - at, 20)
        gap = int(torch.randint(1, reach + 1, (1,), generator=generator))
        texts = [YEARS.format(event=event, century=century, year=year) for year in (years[at], years[0])]
        prompts = dict(zip(("clean", "corrupt"), map(tokenizer.encode, texts), strict=True))
        answers = {"correct": known[century][years[at + gap]], "wrong": known[century][years[at - gap]]}
        rows.append({**prompts, **answers})
    return pairs_of("greater-than", rows, model.device)


def _years(tokenizer: Tokenizer, century: int) -> dict[int, int]:
    """The token of each two last digits, for the years that are cut between their century and those."""
    found = {year: _year(tokenizer, century, year) for year in range(1, 100)}
    return {year: token for year, token in found.items() if token is not None}


def _year(tokenizer: Tokenizer, century: int, year: int) -> int | None:
    """The token of the two last digits, where a year is cut between its century and those."""
    try:
        whole, front = (tokenizer.encode(text, prepend_bos=False) for text in (f" {century}{year:02d}", f" {century}"))
    except ValueError:  # a vocabulary without digits
        return None
    return whole[-1] if len(whole) == len(front) + 1 and whole[:-1] == front else None


def _ordered(model: HookedGPT, batch: int, length: int, generator: torch.Generator) -> PromptPairs:
    """The first half of the vocabulary for words, the second in its order for years: ``… year …`` → a later one."""
    vocabulary, start = model.config.d_vocab, start_token(model)
    front = [] if start is None else [start]
    first_year = vocabulary // 2
    n_years = vocabulary - first_year
    if n_years < 5 or not len(front) + 3 <= length <= model.config.n_ctx:
        raise ValueError(
            f"such a prompt needs at least 10 tokens (there are {vocabulary}) and {len(front) + 3} to "
            f"{model.config.n_ctx} positions; length is {length}"
        )
    words = [token for token in range(first_year) if token != start]
    rows: list[dict[str, Any]] = []
    for _ in range(batch):
        text = [words[i] for i in torch.randint(len(words), (length - len(front),), generator=generator).tolist()]
        year = int(torch.randint(2, n_years - 1, (1,), generator=generator))
        gap = int(torch.randint(1, min(year - 1, n_years - 1 - year) + 1, (1,), generator=generator))
        clean, corrupt = text.copy(), text.copy()
        clean[len(text) // 2], corrupt[len(text) // 2] = first_year + year, first_year
        answers = {"correct": first_year + year + gap, "wrong": first_year + year - gap}
        rows.append({"clean": front + clean, "corrupt": front + corrupt, **answers})
    return pairs_of("greater-than on random tokens", rows, model.device)


GENERATORS: dict[str, Callable[..., PromptPairs]] = {
    "repeated": repeated_tokens,
    "ioi": indirect_object,
    "greater-than": greater_than,
}


def lacks_words(task: str, tokenizer: Tokenizer | None) -> str | None:
    """Why a task of `GENERATORS` has to be made of random tokens with this tokenizer; None where it has the words."""
    if task == "repeated":
        return None
    if tokenizer is None:
        return "the model has no tokenizer"
    if task == "ioi":
        return None if len(_known_names(tokenizer)) > 1 else "the tokenizer has no such names"
    years = {century: _years(tokenizer, century) for century in CENTURIES}
    return None if _usable(years) else "the tokenizer has no such years"


def _known_names(tokenizer: Tokenizer) -> list[str]:
    return [name for name in (f" {word}" for word in NAMES) if single_token(name, tokenizer) is not None]


def _usable(years: Mapping[int, Mapping[int, int]]) -> list[int]:
    """The centuries of which enough years are cut in two."""
    return [century for century, known in years.items() if len(known) >= _LEAST_YEARS]


def _check_drawn(model: object, batch: object, on_tokens: object, length: object) -> None:
    require_model(model)
    require_whole("batch", batch)
    require_flag("on_tokens", on_tokens)
    require_whole("length", length)


def _tokenizer(model: HookedGPT, task: str) -> Tokenizer:
    if model.tokenizer is None:
        raise ValueError(f"{task} on texts needs a tokenizer, and this model has none; on_tokens=True needs none")
    return model.tokenizer


def _encoded(tokenizer: Tokenizer, prompts: Sequence[str], correct: str, wrong: str) -> dict[str, Any]:
    clean, corrupt = (tokenizer.encode(prompt) for prompt in prompts)
    answers = {"correct": single_token(correct, tokenizer), "wrong": single_token(wrong, tokenizer)}
    return {"clean": clean, "corrupt": corrupt, **answers}


def _pick(choices: Sequence[T], generator: torch.Generator) -> T:
    return choices[int(torch.randint(len(choices), (1,), generator=generator))]
