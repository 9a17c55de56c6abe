"""The runner's asserts show their values, as a test's do."""

import pytest

pytest.register_assert_rewrite("runner", "stage")
