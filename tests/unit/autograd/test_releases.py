"""Segment handles: what becomes of them at the peer that offered them."""

from __future__ import annotations

from gradwire.autograd import AutogradMessageId, DistAutogradContainer, PeerReleases
from gradwire.autograd.kept_state.graph_segments import SegmentHandle

ID = AutogradMessageId(1, 2, 3)


def test_a_handle_is_known_when_it_is_released_and_released_when_it_is_gone() -> None:
    container = DistAutogradContainer()
    releases = PeerReleases(container.handles)
    handle = SegmentHandle(ID)
    releases.offer(handle)
    assert not handle.is_known
    container.release([ID])
    assert handle.is_known
    assert releases.take() == []
    del handle
    assert releases.take() == [ID]
    assert not container.handles
    container.release([ID])  # a release that comes late, or twice


def test_handles_are_forgotten_with_the_link_that_they_were_offered_over() -> None:
    container = DistAutogradContainer()
    releases = PeerReleases(container.handles)
    handle, other = SegmentHandle(ID), SegmentHandle(AutogradMessageId(1, 3, 4))
    releases.offer(handle)
    releases.offer(other)
    del other  # nobody is told any more
    del releases
    assert not container.handles
    del handle
