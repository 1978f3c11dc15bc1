"""Conversations: `{"id": ..., "messages": [{"role", "content"}]}` or ShareGPT's `conversations` of `from` and `value`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx.datasets.agreement import require_agreement
from hsx.datasets.fields import Bad
from hsx.datasets.placing import TemplateError
from hsx.datasets.rows import Limits, Naming, Records, checked_ids, fitted, rows_of
from hsx.datasets.spans import span_mask
from hsx.datasets.turns import tools_of, turns_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hsx.datasets.fields import Fields
    from hsx.datasets.template import ChatTemplate
    from hsx.records import BadRow, Row


class ChatRows:
    """A `ports.Dataset` of conversations, tokenised with the model's own chat template.

    `loss_mask` is 1 on what the model writes in the assistant's turns, up to and with the end-of-turn token, and 0 elsewhere.

    Args:
        source: the files.
        limits: what a usable row keeps to.
        template: the model's.
        naming: the names of the fields.
        roles: names of roles beside those that are known.
        alike: whether a tokenizer that transformers loads otherwise is refused, before the first row is read.
    """

    def __init__(
        self,
        source: Records,
        limits: Limits,
        template: ChatTemplate,
        naming: Naming | None = None,
        roles: Mapping[str, str] | None = None,
        *,
        alike: bool = True,
    ) -> None:
        self._source = source
        self._limits = limits
        self._template = template
        self._naming = naming or Naming()
        self._roles = roles or {}
        self._alike = alike

    def __iter__(self) -> Iterator[Row | BadRow]:
        """All rows in file order; see `ports.Dataset`. Raises RunError `chat_unavailable` too, see `agreement`."""
        if self._alike:
            require_agreement(self._template.tokenizer)
        return rows_of(self._source, self._row, self._naming)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of files, tokenizer and template, and the settings that decide which rows are used, and how."""
        return {
            "dataset.sha256": self._source.sha256(),
            "dataset.format": "chat",
            **self._limits.fingerprint(),
            **self._naming.fingerprint(),
            **({"dataset.roles": repr(sorted(self._roles.items()))} if self._roles else {}),
            **self._template.fingerprint(),
        }

    def _row(self, sample_id: str, fields: Fields, line: int) -> Row:
        columns = self._naming.columns
        turns = turns_of(fields, columns, self._roles)
        try:
            rendered = self._template.render(turns, tools_of(fields, columns))
        except TemplateError as error:
            raise Bad("bad_chat", str(error)) from error
        except RecursionError as error:
            raise Bad("bad_chat", "what a call is given, or a declared function, is nested too deep") from error
        if self._limits.too_long == "reject":
            self._template.tokenizer.require_room(rendered.text, self._limits.max_tokens)
        tokens, offsets = self._template.encode(rendered.text)
        self._template.tokenizer.require_single_start(tokens)
        ids = checked_ids(tokens, self._limits)
        mask = span_mask(rendered.text, offsets, rendered.spans)
        return fitted(sample_id, ids, mask, self._limits, line)
