"""From a string, chat messages or token ids to a Prompt that holds exactly what the target is given."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .names import hint

# what Transformers itself hands to a chat template, and the arguments that it handles
_PROVIDED = {"messages", "raise_exception", "strftime_now"}
_HANDLED = {"add_generation_prompt", "continue_final_message", "tools", "documents"}


@dataclass(frozen=True)
class Prompt:
    """What was asked, exactly: ids, the rendered text, and how a chat template got there."""

    ids: tuple[int, ...]
    text: str | None  # None: token ids without a tokenizer
    messages: tuple[dict[str, Any], ...] | None = None
    template_args: dict[str, Any] = field(default_factory=dict)  # passed to the chat template
    template_defaults: dict[str, Any] = field(default_factory=dict)  # read by the template but not passed

    def to_dict(self) -> dict[str, Any]:
        messages = None if self.messages is None else list(self.messages)
        return {**vars(self), "ids": list(self.ids), "messages": messages}


def encode(prompt: Any, tokenizer: Any, rows: int, *, chat: bool, template_args: dict[str, Any]) -> Prompt:
    """See `Pair.encode`; ids must lie in 0..rows-1."""
    if isinstance(prompt, Sequence) and len(prompt) == 0:
        raise ValueError("the prompt is empty: give at least one token, or a chat message")
    if isinstance(prompt, str) and tokenizer is None:
        raise ValueError("this pair has no tokenizer: give token ids, or build Pair(target, drafter, tokenizer)")
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(prompt, str) and chat and template:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and isinstance(prompt[0], dict):
        if not template:
            raise ValueError("chat messages need a tokenizer with a chat template: give a string or token ids")
        text, args, defaults = _render(prompt, tokenizer, template_args)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote the special tokens already
        return Prompt(_row(ids, rows), text, tuple(prompt), args, defaults)
    if template_args:
        raise ValueError(f"this prompt goes through no chat template, so {', '.join(template_args)} would be lost")
    if isinstance(prompt, str):
        return Prompt(_row(tokenizer(prompt)["input_ids"], rows), prompt)
    row = _row(prompt, rows)
    return Prompt(row, None if tokenizer is None else decode(row, tokenizer))


def decode(ids: Sequence[int], tokenizer: Any) -> str:
    """The text of token ids, special tokens included; without a tokenizer `[id 5][id 9]`."""
    if tokenizer is None:
        return "".join(f"[id {i}]" for i in ids)
    row = [int(i) for i in ids]
    return tokenizer.decode(row, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _row(ids: Any, rows: int) -> tuple[int, ...]:
    """Token ids [n] or [1, n], of any kind that holds integers -> a tuple of ids."""
    row = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(row) == 1 and isinstance(row[0], (list, tuple)):
        row = row[0]
    if len(row) == 0:
        raise ValueError("the prompt is empty: give at least one token, or a chat message")
    try:
        row = [operator.index(i) for i in row]
    except TypeError:
        raise ValueError(
            f"a prompt is a string, chat messages or one row of integer token ids, not {ids!r:.80}"
        ) from None
    wrong = [i for i in row if not 0 <= i < rows]
    if wrong:
        raise ValueError(f"the prompt holds id {wrong[0]}, outside the target's ids (0..{rows - 1})")
    return tuple(row)


def _render(
    messages: Sequence[Any], tokenizer: Any, given: dict[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    for m in messages:
        if not isinstance(m, dict) or not {"role", "content"} <= m.keys():
            raise ValueError(f"a chat message is a dict with role and content, not {m!r:.80}")
    args = {"add_generation_prompt": not given.get("continue_final_message", False), **given}
    defaults = _template_defaults(tokenizer, args)
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **args), args, defaults


def _template_defaults(tokenizer: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Variables the chat template reads and nobody set, with the value of their `default` filter, if any.

    Raises ValueError when args holds a name that neither the template nor Transformers reads.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes

    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(tokenizer.get_chat_template())
    except TemplateSyntaxError:  # a tag of Transformers' own: the template still renders, its variables stay unknown
        return {}
    reads = meta.find_undeclared_variables(tree) - _PROVIDED - set(tokenizer.special_tokens_map)
    for name in args.keys() - reads - _HANDLED:
        otherwise = f"it reads {', '.join(sorted(reads))}"
        raise ValueError(f"the chat template does not read {name!r}: {hint(name, reads, otherwise)}")
    defaults: dict[str, Any] = dict.fromkeys(sorted(reads - args.keys()), "not set")
    for call in tree.find_all(nodes.Filter):
        if call.name in ("default", "d") and isinstance(call.node, nodes.Name) and call.node.name in defaults:
            value = call.args[0] if call.args else None
            if isinstance(value, nodes.Const):
                defaults[call.node.name] = value.value
    return defaults
