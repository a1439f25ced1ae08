"""Which of several servers holds a response: what a router must do, as a function."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from spectool_core.vllm.wire import ID_PREFIX

__all__ = ["replica_of"]


def replica_of(response_id: str, replicas: Sequence[str]) -> str:
    """The replica that a chat request and all posts for its response go to (rendezvous hashing).

    Args:
        response_id: the header `X-Request-Id` of the chat request, or the id in the path of a post.
        replicas: the servers' names, in any order, the same for every request.

    Raises:
        ValueError: there is no replica.
    """
    request_id = response_id.removeprefix(ID_PREFIX)
    return max(replicas, key=lambda replica: hashlib.sha256(f"{replica}\0{request_id}".encode()).digest())
