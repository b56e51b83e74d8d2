"""Starting a command anew with its memory in huge pages."""

import os
import sys

import pytest

from hispec.infer import bench, huge_pages


@pytest.fixture
def restarts(monkeypatch, tmp_path):
    """The commands that were started anew; the system offers huge pages to those that ask."""
    calls = []
    monkeypatch.setattr(os, "execv", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(os, "confstr_names", {"CS_GNU_LIBC_VERSION": 2})
    monkeypatch.setattr(huge_pages, "POLICY", tmp_path / "enabled")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "hispec.infer.bench", "--quick"])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    huge_pages.POLICY.write_text("always [madvise] never\n")
    return calls


def test_a_command_starts_anew_once(restarts):
    huge_pages.restart_in_huge_pages()
    assert restarts == [(sys.executable, ["python", "-m", "hispec.infer.bench", "--quick"])]
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert huge_pages.has_asked()
    huge_pages.restart_in_huge_pages()
    assert len(restarts) == 1


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"), ("glibc.malloc.hugetlb=0", None)],
)
def test_what_the_user_has_set_stays(restarts, monkeypatch, given, wanted):
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    huge_pages.restart_in_huge_pages()
    assert len(restarts) == (wanted is not None)
    assert os.environ["GLIBC_TUNABLES"] == (wanted or given)
    assert huge_pages.has_asked() == (wanted is not None)


@pytest.mark.parametrize("policy", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_nothing_is_asked_where_it_would_change_nothing(restarts, policy):
    huge_pages.POLICY.unlink() if policy is None else huge_pages.POLICY.write_text(policy)
    huge_pages.restart_in_huge_pages()
    assert not restarts


def test_another_c_library_has_no_tunables(restarts, monkeypatch):
    monkeypatch.setattr(os, "confstr_names", {})
    huge_pages.restart_in_huge_pages()
    assert not restarts


def test_only_the_command_itself_starts_anew(restarts, capsys):
    assert bench.main(["--methods", "autoregressive"]) == 2
    assert "no prompts" in capsys.readouterr().err
    assert not restarts
