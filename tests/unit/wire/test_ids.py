"""Ids of contexts and messages, which other nodes choose."""

from __future__ import annotations

import copy
import pickle

import pytest
from tests.unit.wire.test_hashing import same_tuple_hash

from gradwire.autograd import AutogradMessageId, ContextId
from gradwire.wire.hashing import check_dict_keys, check_set_items

COUNT = 5000


@pytest.mark.parametrize("kind", [ContextId, AutogradMessageId])
def test_none_are_in_each_others_way_however_they_were_chosen(
    kind: type[ContextId | AutogradMessageId],
) -> None:
    chosen = [same_tuple_hash(index) for index in range(COUNT)]
    assert len(set(map(hash, chosen))) == 1
    ids = [kind(*pair, 0) for pair in chosen]
    assert len(set(map(hash, ids))) == COUNT
    check_dict_keys(ids)
    check_set_items(ids)


def test_equal_ones_have_equal_hashes() -> None:
    id = AutogradMessageId(2**64 - 1, 2**64 - 1, 2**64 - 1)
    for other in (
        AutogradMessageId(id.peer, id.number, id.key),
        copy.copy(id),
        pickle.loads(pickle.dumps(id)),
    ):
        assert other == id
        assert hash(other) == hash(id)


@pytest.mark.parametrize("text", ["", "7", "1f:", "-1:7", "1f0c5a3b9d2e4f601:7", "1f:-7", f"1f:{2**64}"])
def test_text_that_names_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no context"):
        ContextId.from_text(text)


def test_text_names_the_one_that_writes_it() -> None:
    id = ContextId(2**64 - 1, 7, 0)
    assert ContextId.from_text(str(id)) == id
