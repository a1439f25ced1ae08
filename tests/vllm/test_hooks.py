from __future__ import annotations

import pytest

from spectool_core.vllm.hooks import MissingHookError, check_hooks


def test_a_missing_hook_is_named_with_the_version_and_what_works_without_it() -> None:
    check_hooks({"str": (str, ["upper"])}, "0.1", "it works without")
    with pytest.raises(MissingHookError) as caught:
        check_hooks({"str": (str, ["upper", "shout"])}, "0.1", "it works without")
    assert (caught.value.version, caught.value.hook) == ("0.1", "str.shout")
    assert str(caught.value) == "vLLM 0.1 has no str.shout, which engine mode needs; it works without"
