"""The wheel's packages; everything else is in pyproject.toml.

The load test of `tests/load` is in the wheel as `paceline_load`, for `paceline load`, without its own tests.
"""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

LOAD = "paceline_load"


class BuildPy(build_py):
    """Leaves out what only a checkout can run."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return package, name and path of each module."""
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        is_test = {name for _, name, _ in modules if name.startswith("test_")} | {"ci", "conftest", "fake_server"}
        return [module for module in modules if package != LOAD or module[1] not in is_test]


setup(
    cmdclass={"build_py": BuildPy},
    packages=[*find_packages(include=["engine*", "cluster*", "deployments*"]), LOAD],
    package_dir={LOAD: "tests/load"},
)
