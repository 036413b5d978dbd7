"""The dashboard's picture has every panel, with its title and the names of its series."""

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.k8s import dashboard_picture
from tests.k8s.dashboard_picture import draw, legend
from tests.k8s.monitoring import dashboard, queries
from tests.k8s.prometheus import Prometheus, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {"position": "3", "reason": "timeout", "finished_reason": "stop", "num_draft_tokens": "2"}


class Recorded(Prometheus):
    """Has one series for every query but one, and remembers which were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def series(self, query: str, start_s: float, end_s: float) -> list[Series]:
        self.asked.append(query)
        return [] if "resubmissions" in query else [Series(LABELS, [(start_s, 0.5), (start_s + 1, 0.6), (end_s, 1.0)])]


def test_every_query_is_drawn_in_its_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(dashboard_picture, "save", lambda figure, png: drawn.append(figure))
    database = Recorded()
    draw(database, 1000.0, 1180.0, tmp_path / "dashboard.png")
    window, namespace = dashboard_picture.WINDOW, dashboard_picture.NAMESPACE
    assert database.asked == list(queries(window=window, namespace=namespace).values())
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert [axes.get_title(loc="left") for axes in drawn[0].axes] == [panel["title"] for panel in panels]
    position = next(axes for axes in drawn[0].axes if axes.get_title(loc="left") == "Acceptance by position")
    assert [text.get_text() for text in position.get_legend().get_texts()] == ["3"]
    values = position.get_lines()[0].get_ydata()
    assert [(second, value) for second, value in enumerate(values) if not isnan(value)] == [
        (0, 0.5),
        (1, 0.6),
        (180, 1),
    ]


def test_a_legend_has_the_labels_of_its_series() -> None:
    series = Series(LABELS, [])
    assert legend("resubmitted: {{reason}}", series) == "resubmitted: timeout"
    assert legend("{{le}}", series) == ""
