"""Native kernels in a cache of their own, so that the other tests stay on torch."""

import pytest

from dampen.native import library


@pytest.fixture(scope="session")
def native_cache(tmp_path_factory):
    """A cache folder with the kernels built, once for all modules here."""
    folder = tmp_path_factory.mktemp("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAMPEN_CACHE", str(folder))
        try:
            library.build()
        except library.BuildError as error:
            pytest.skip(f"no native kernels: {error}")
        finally:
            library.reset()
    return folder


@pytest.fixture(scope="module")
def built(native_cache):
    """The kernels in use, as their operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAMPEN_CACHE", str(native_cache))
        library.build()
        from dampen.native import ops

        yield ops
    library.reset()
