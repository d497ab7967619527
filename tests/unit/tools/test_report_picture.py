"""The prompt of the documentation's picture: the demo's, up to a chart that is saved."""

from __future__ import annotations

from tools import report_picture


def test_the_chart_is_saved_and_nothing_is_left_dangling() -> None:
    nodes = report_picture.prompt()
    classes = {node["class_type"]: node["inputs"] for node in nodes.values()}
    assert classes["KSampler"]["steps"] == report_picture.STEPS
    assert classes["SageAttention2"]["backend"] == "reference" and classes["SageAttention2"]["measure_quality"]
    source, output = classes["SaveImage"]["images"]
    assert nodes[source]["class_type"] == "SageAttention2Report" and output == 3
    links = [value for node in nodes.values() for value in node["inputs"].values() if isinstance(value, list)]
    assert all(link[0] in nodes for link in links)
