"""Lists of Anthropic's API come in pages between cursors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from penstock.gateway.errors import invalid
from penstock.gateway.sessions.responses.schemas import WholeNumber
from penstock.gateway.wire.strict import StrictBody


class CursorQuery(StrictBody):
    """The query of a list."""

    limit: Annotated[WholeNumber, Field(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None


def window(ids: Sequence[str], query: CursorQuery) -> tuple[Sequence[str], bool]:
    """The ids on a page, and whether there are more beyond it.

    Raises:
        ApiError: 400 for a cursor that is not in the list.
    """
    for name, cursor in (("after_id", query.after_id), ("before_id", query.before_id)):
        if cursor is not None and cursor not in ids:
            raise invalid(f"{name}: there is no '{cursor}' in this list.", name)
    if query.before_id is not None:
        earlier = ids[: ids.index(query.before_id)]
        return earlier[-query.limit :], len(earlier) > query.limit
    later = ids if query.after_id is None else ids[ids.index(query.after_id) + 1 :]
    return later[: query.limit], len(later) > query.limit


def cursor_page(shown: Sequence[Mapping[str, Any]], ids: Sequence[str], *, has_more: bool) -> dict[str, Any]:
    """The object of a page, of which `ids` are known even where what they name is gone."""
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"data": list(shown), "has_more": has_more, **ends}
