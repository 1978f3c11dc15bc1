"""A ledger's rows that change while a verification reads them, as a running job and a move beside it change them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hsx.records import CommittedRow


class ChangingRows:
    """Implements `hsx.verify.sources.Rows`.

    Args:
        rows: what is read at the beginning.
        later: by index, what each further question after the sample is answered with, in turn; the last one stays. None: it is
            not committed any more. Samples that are not named stay as they are.
    """

    def __init__(self, rows: Iterable[CommittedRow], later: Mapping[int, Sequence[CommittedRow | None]]) -> None:
        self._rows = {row.index: row for row in rows}
        self._later = {index: deque(answers) for index, answers in later.items()}

    def committed(self, since: float | None = None) -> Iterator[CommittedRow]:
        """All rows of the beginning; they do not say when they were committed, so `since` leaves out none."""
        del since
        return iter(self._rows.values())

    def row(self, index: int) -> CommittedRow | None:
        """The next answer."""
        answers = self._later.get(index)
        if answers is None:
            return self._rows.get(index)
        return answers[0] if len(answers) == 1 else answers.popleft()
