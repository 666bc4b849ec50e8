"""The reproduction page: its verdicts by their rule, and every statement of the paper on it."""

from __future__ import annotations

import re

import pytest

import paper
import reproduction


def cells(better: int, equal: int, worse: int) -> list[dict]:
    names = ["better"] * better + ["equal"] * equal + ["worse"] * worse
    return [{"verdict": name} for name in names]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((9, 1, 0), "**holds**"),
        ((9, 0, 1), "**in part**"),
        ((5, 5, 0), "**in part**"),
        ((1, 9, 0), "**does not hold**"),
        ((0, 0, 8), "**does not hold**"),
        ((7, 0, 0), "open: few cells"),
        ((0, 0, 0), reproduction.MISSING),
    ],
)
def test_verdicts_count_for_and_against_alike(counts, expected: str):
    assert reproduction.verdict(cells(*counts)) == expected


def test_a_run_that_was_stopped_counts_against():
    records = [*cells(9, 0, 0), {"error": "the state became NaN"}]
    assert reproduction.verdict(records) == "**in part**"
    assert reproduction.tally(records) == "better 9, equal 0, worse 0, stopped 1 of 10"


def test_every_numbered_thing_of_the_paper_has_a_row():
    text = reproduction.PAGE.read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| "))
    for name in (
        *("Prop. 4.1", "Remark 4.2", "Thm 4.3", "Thm 4.4", "Remark 4.5", "Lemma 4.6", "Thm 4.7", "Thm 4.8", "Cor. 4.9"),
        *("Thm 4.10", "Thm 4.11", "Cor. 4.12", "Remark 4.13", "Prop. C.1", "Prop. D.1", "Cor. D.2", "Remark D.3"),
        *("Prop. D.4", "Prop. D.5", "Prop. D.6", "Remark D.7", "Prop. E.1", "Remark E.2", "Alg. 1", "Alg. 2"),
        *("Figs 1, 2", "Fig. 3", "Fig. 4", "Fig. 5", "Figs 6, 7", "Fig. 8", "Fig. 9", "Figs 10, 11, 12"),
        *("Table 1", "Table 2", "Table 3", "IS", "FD-DINOv2"),
    ):
        assert name in rows, name
    longest = max((len(cell), cell) for line in text.splitlines() if line.startswith("| ") for cell in line.split("|"))
    assert longest[0] < 240, longest


def test_scores_are_judged_by_the_spread_of_their_parts():
    """Two standard errors of 0.3 and 0.4 over ten parts are 0.316; one per cent of 40 is 0.4."""
    found = reproduction.Evidence()
    same = {"model": "cifar10", "solver": "2m", "grid": "edm", "ending": "lowered", "nfe": 5, "samples": 9}
    for plain, expected in ((8.0, ["worse", "equal", "better"]), (40.0, ["equal", "equal", "equal"])):
        found.cells = [{**same, "mode": "plain", "score": plain, "score_deviation": 0.3}]
        moved = [{**same, "score": plain + step, "score_deviation": 0.4} for step in (-0.33, 0.3, 0.33)]
        assert [r["verdict"] for r in found.scored(moved)] == expected


def test_records_of_a_network_fill_every_row(monkeypatch):
    """With made-up records of every cell of every plan nothing of the network is left open."""
    made = [
        {
            "model": "cifar10",
            **paper.asdict(cell),
            "samples": 5000,
            "fid": 20.0,
            "score": 8.0 if cell.mode == "plain" else 8.5,
            "score_deviation": 0.5,
            **({} if cell.mode == "plain" else {"difference": -1.0, "difference_error": 0.1, "verdict": "better"}),
            **({} if cell.mode == "plain" else {"second_verdict": "equal"}),
        }
        for cell in dict.fromkeys(cell for plan in paper.PLANS.values() for cell in plan)
    ]
    table3 = {"table": "table3", "model": "cifar10", "device": "x", "nfe": 5, "network_calls": 5, "backward_passes": 0}
    made += [{**table3, "mode": mode, "ratio": 2.0} for mode in paper.MODES]
    made += [{"figure": name, "file": f"paper_{name}.png"} for name in paper.FIGURES]
    fashion = [{**record, "model": "fashion"} for record in made if "mode" in record]
    files = {"paper": made, "paper_fashion": fashion}
    read = reproduction.read
    monkeypatch.setattr(reproduction, "read", lambda name: files.get(name) or read(name))
    found = reproduction.Evidence()
    for row in found.experiments():
        assert reproduction.MISSING not in " ".join(row), row
        assert "DINOv2" not in row[0] or row[1:3] == ("**does not hold**", "better 0, equal 64, worse 0 of 64")
    assert "21.00 → 20.00 (± 0.20)" in found.experiments()[0][2]
    text = "".join(map(found.table_2, reproduction.ENDINGS))
    assert text.count("**-1.00** ±\N{NO-BREAK SPACE}0.20") == 2 * len(
        {paper.replace(c, mode="plain") for p in ("core", "bare", "zero") for c in paper.PLANS[p]}
    )
    assert re.search(r"\| consistency \| better \d+, equal 0, worse 0 of \d+", found.others())
