"""The search in the chain: what is quicker stays, what the table knows is left. Nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from bench import chain_search, gpu_scale
from bench.chain_search import Made, Search, cases, made, search_all, write
from frtc.codegen import build
from frtc.codegen.nvrtc import Cubin
from frtc.errors import UsageError
from frtc.kernels.tactic import Tactic, Tactics, read_tactics

(CASE,) = cases("pi05", "cpu")
PROGRAM = "denoise"


class Here:
    """A pool that works at once."""

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done


def chosen_in(one: Made) -> dict[str, str]:
    return {key: str(candidates[0]) for sites in one.sites.values() for key, _, candidates in sites}


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    """Of programs that nobody compiles; the table is empty, and every choice of the cost model takes a microsecond."""
    monkeypatch.setattr(build, "compile_all", lambda jobs, **more: [Cubin(b"", job.entry) for job in jobs])
    monkeypatch.setattr(chain_search, "MOST", 2)
    monkeypatch.setattr(chain_search, "table_of", lambda target: Tactics(target, ""))
    monkeypatch.setattr(chain_search, "times_of", lambda case, one, device: times(one, {}))
    return Search(CASE, "cpu", Here(), float("inf"), again=False)  # type: ignore[arg-type]


def times(one: Made, saves: Mapping[str, float]) -> dict[str, float]:
    total = 1000.0 - sum(saves.get(name, 0.0) for name in chosen_in(one).values())
    return {name: total for name in one.sites}


def test_what_is_quicker_stays(search: Search, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One site has a quicker candidate; another one's is quicker by less than what counts."""
    sites = {key: found for key, _, found in made(CASE, ()).sites[PROGRAM] if len(found) > 1}
    (first, better), (second, hardly) = ((key, found[1]) for key, found in list(sites.items())[:2])
    saves = {str(better): 100.0, str(hardly): 1.0}
    assert len(saves) == 2
    monkeypatch.setattr(chain_search, "times_of", lambda case, one, device: times(one, saves))
    monkeypatch.setenv("OUT", str(tmp_path))
    for _ in search.run([PROGRAM]):
        write([search], search.chosen, "cpu", 1.0)
    named = {key: (t.kernel, dict(t.config)) for key, t in search.chosen.items()}
    assert named[first] == (better.kernel, dict(better.config))
    assert named[second] == (sites[second][0].kernel, dict(sites[second][0].config))
    table = read_tactics(tmp_path / "hopper.json", "hopper").by_site
    assert table.keys() == search.chosen.keys() and all(0 < t.us < 1000 for t in table.values())
    assert (tmp_path / "chain_search.json").is_file()


def test_what_the_table_knows_is_left(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {key: found[0] for key, _, found in made(CASE, ()).sites[PROGRAM]}
    one, *others = known
    monkeypatch.setattr(chain_search, "table_of", lambda target: Tactics(target, "", "", {one: known[one]}))
    list(search.run([PROGRAM]))
    assert one not in search.chosen and set(search.chosen) <= set(others) and search.chosen
    again = Search(CASE, "cpu", Here(), float("inf"), again=True)  # type: ignore[arg-type]
    list(again.run([PROGRAM]))
    assert one in again.chosen


def test_named_sites_are_searched_whatever_is_known(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no others: that the table has one, or that it has few launches, does not matter."""
    sites = made(CASE, ()).sites[PROGRAM]
    total = sum(launches for _, launches, _ in sites)
    rare = min(sites, key=lambda site: site[1])
    table = {key: found[0] for key, _, found in sites}
    monkeypatch.setattr(chain_search, "SHARE", 2 * rare[1] / total)
    monkeypatch.setattr(chain_search, "table_of", lambda target: Tactics(target, "", "", table))
    search.chosen.update(table)
    search.texts = (rare[0],)
    list(search.run([PROGRAM]))
    assert search.searched == {rare[0]}
    list(search.run([PROGRAM]))  # as for another program, or case
    assert len(search.rows) == 2 + len(rare[2]) - 1
    search.texts = ()
    assert not search.wanted(sites)


def test_sites_that_nobody_has_are_a_mistake(search: Search) -> None:
    search.texts = ("of no op",)
    with pytest.raises(UsageError, match="no site of denoise holds 'of no op'"):
        search_all([search], {}, [PROGRAM])


def test_programs_that_nobody_has_are_a_mistake(search: Search) -> None:
    with pytest.raises(UsageError, match="there is no program nothing"):
        search_all([search], {}, [PROGRAM, "nothing"])


@pytest.mark.parametrize("main", [chain_search.main, gpu_scale.main])
def test_cases_that_nobody_has_are_a_mistake(monkeypatch: pytest.MonkeyPatch, capsys: Any, main: Any) -> None:
    """Said before anything is compiled, with the labels that there are."""
    monkeypatch.setattr("sys.argv", ["bench", "--only", "c51 fp9"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "c51 fp9" in said and cases("pi05", "cuda")[0].label in said


def test_a_candidate_that_fails_is_none(search: Search, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls = 0

    def fails(case: Any, one: Made, device: str) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("it spills")
        return times(one, {})

    monkeypatch.setattr(chain_search, "times_of", fails)
    list(search.run([PROGRAM]))
    assert "RuntimeError: it spills" in capsys.readouterr().out
    own = {key: found[0] for key, _, found in made(CASE, ()).sites[PROGRAM]}
    assert all(str(tactic) == str(own[key]) for key, tactic in search.chosen.items())


def test_no_time_no_sites(search: Search) -> None:
    search.until = 0.0
    assert list(search.run([PROGRAM])) == [] and not search.chosen


def test_tactics_are_compiled(search: Search) -> None:
    """The one that is asked for is the one that is compiled."""
    key, other = next((key, found[1]) for key, _, found in made(CASE, ()).sites[PROGRAM] if len(found) > 1)
    assert isinstance(other, Tactic) and chosen_in(made(CASE, (other,)))[key] == str(other)
