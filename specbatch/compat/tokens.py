"""Do a token's id, the special tokens and the chat template mean the same to both?"""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha256

from specbatch.compat.checkpoint import Checkpoint
from specbatch.compat.pair import Pair
from specbatch.compat.report import Finding, Point

NAMED_ENTRIES = 5
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def differing_ids(target: dict[str, int], draft: dict[str, int]) -> dict[int, tuple[list[str], list[str]]]:
    """Every id that does not stand for the same token in both, with its token in each (none, where an id is unused), by id."""
    differences: dict[int, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for token, index in sorted(target.items() - draft.items()):
        differences[index][0].append(token)
    for token, index in sorted(draft.items() - target.items()):
        differences[index][1].append(token)
    return dict(sorted(differences.items()))


def check_token_ids(pair: Pair) -> Finding:
    """Entry by entry: equal sizes prove nothing, and a draft's id is read by the target as its own token."""
    if pair.is_head and not pair.draft.has_tokenizer:
        return Point("token_ids", len(pair.target.token_ids), None).ok("The head brings no tokenizer: it drafts in the target's ids.")
    target, draft = pair.target.token_ids, pair.draft.token_ids
    differences = differing_ids(target, draft)
    if not differences:
        return Point("token_ids", len(target), len(draft)).ok(f"All {len(target)} entries have the same id in both.")
    first = list(differences.items())[:NAMED_ENTRIES]
    named = "; ".join(f"id {index} is {_say(theirs)} in the target and {_say(ours)} in the draft" for index, (theirs, ours) in first)
    rest = f"; and {len(differences) - len(first)} more" if len(differences) > len(first) else ""
    count = f"{len(differences)} of {max(len(target), len(draft))} token ids {'differs' if len(differences) == 1 else 'differ'}"
    return Point(
        "token_ids",
        ", ".join(f"{index}: {_say(theirs)}" for index, (theirs, _) in first),
        ", ".join(f"{index}: {_say(ours)}" for index, (_, ours) in first),
    ).failure(f"{count}: {named}{rest}. Use a draft with the target's own tokenizer (the same family and version), or mode ngram.")


def check_vocab_size(pair: Pair) -> Finding:
    """The embedding's rows, which a family may pad differently by size (Qwen2.5: 152064 at 7B, 151936 at 0.5B) for one tokenizer."""
    target, draft = pair.target.number("vocab_size"), pair.draft.number("vocab_size")
    point = Point("vocab_size", target, draft)
    if target is None or draft is None:
        return point.warning(
            f"config.json gives vocab_size {target} and {draft}: add it where it is missing, so that they can be compared."
        )
    if target == draft:
        return point.ok(f"Both embed {target} ids.")
    if pair.is_head:
        return point.failure(f"The target embeds {target} ids, the head {draft}: use the head that was trained for this target.")
    if needs_heterogeneous_vocab(pair):
        return point.warning(
            f"The tokens agree, and the embeddings are padded to {target} and {draft} rows: the engine is to be started with vLLM's "
            "use_heterogeneous_vocab, which drafts greedily only (draft_sample_method greedy)."
        )
    return point.failure(
        f"The target embeds {target} ids, the draft {draft}, and vLLM refuses that: use a draft of the target's family, or mode ngram."
    )


def needs_heterogeneous_vocab(pair: Pair) -> bool:
    """vLLM compares vocab_size only (config/speculative.py, verify_equal_vocab_size_if_draft_model), unless this option is set.

    Measured with a padded copy of a target: the same text and as many accepted tokens as without padding.
    """
    target, draft = pair.target.number("vocab_size"), pair.draft.number("vocab_size")
    if pair.is_head or target is None or draft is None or target == draft:
        return False
    return not differing_ids(pair.target.token_ids, pair.draft.token_ids)


def check_special_tokens(pair: Pair) -> Finding:
    """Ids that begin, end and pad a text. The target's decide what is generated: a draft that ends elsewhere is only rejected more."""
    target = {name: _special_ids(pair.target, name) for name in SPECIAL_IDS}
    draft = {name: _special_ids(pair.draft, name) for name in SPECIAL_IDS}
    point = Point("special_tokens", _list(target), _list(draft))
    unequal = [name for name in SPECIAL_IDS if target[name] and draft[name] and target[name] != draft[name]]
    if not unequal:
        return point.ok("Begin, end and padding agree where both name them.")
    named = "; ".join(f"{name} is {target[name]} in the target and {draft[name]} in the draft" for name in unequal)
    return point.warning(
        f"{named}. The draft was tuned for other endings, and more of its tokens will be rejected: prefer the draft's variant "
        "(instruct or base) that matches the target's."
    )


def check_chat_template(pair: Pair) -> Finding:
    target, draft = pair.target.chat_template, pair.draft.chat_template
    point = Point("chat_template", _digest(target), _digest(draft))
    if pair.is_head:
        return point.ok("A head reads the target's hidden states: it needs no template.")
    if target == draft:
        return point.ok("Both were written for the same template." if target else "Neither has a template.")
    return point.warning(
        f"The chat templates differ (target {point.target}, draft {point.draft}). Prompts follow the target's; a draft that was tuned on "
        "another accepts less: prefer one that was tuned with the target's template."
    )


def _special_ids(checkpoint: Checkpoint, name: str) -> list[int]:
    """generation_config.json wins over config.json, as in vLLM; one id or a list of them."""
    ids = checkpoint.generation_config.get(name)
    ids = checkpoint.config.get(name) if ids is None else ids
    return [] if ids is None else sorted(ids) if isinstance(ids, list) else [ids]


def _list(ids: dict[str, list[int]]) -> str:
    return ", ".join(f"{name.removesuffix('_token_id')} {'/'.join(map(str, values)) or 'unset'}" for name, values in ids.items())


def _digest(template: str | None) -> str | None:
    return template and f"sha256:{sha256(template.encode()).hexdigest()[:12]}"


def _say(tokens: list[str]) -> str:
    return " and ".join(map(repr, tokens)) or "no token"
