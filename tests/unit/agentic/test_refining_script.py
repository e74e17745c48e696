"""The cookbook's script that refines data, as it stands."""

import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "cookbook" / "exp" / "data_pipeline" / "process_and_save.py"
BIRD = "A bird beats its wings, which push the air down, and so the air pushes the bird up into the sky."
MILL = "The mill stands by the river; two brothers built it in the year 1804, and it still grinds corn today."


def test_rows_are_refined_saved_and_accounted_for(tmp_path, monkeypatch, model_id):
    chats = [
        ("human", "How does a bird fly?", "gpt", BIRD),
        ("user", "How do birds fly?", "assistant", BIRD.replace("sky", "sun")),
        ("user", "Who built the mill?", "assistant", MILL),
        ("user", "Do it.", "assistant", "I'm sorry, but I can't help with that."),
        ("user", "Say it.", "assistant", "and so it goes on and on without any end to it " * 9),
        ("user", "Und?", "assistant", "Ein Vogel schlägt mit den Flügeln und fliegt in den blauen Himmel hinauf."),
    ]
    rows = [
        {"id": i, "messages": [{"role": asks, "content": question}, {"role": answers, "content": answer}]}
        for i, (asks, question, answers, answer) in enumerate(chats)
    ]
    data, saved, left = tmp_path / "chats.jsonl", tmp_path / "new" / "refined.jsonl", tmp_path / "dropped.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"MAX_PERPLEXITY": "1e9", "MIN_IFD": "0"}
    for name, value in {
        "DATASET_ID": data,
        "OUTPUT": saved,
        "DROPPED": left,
        "SCORE_MODEL_ID": model_id,
        **settings,
    }.items():
        monkeypatch.setenv(name, str(value))

    runpy.run_path(str(SCRIPT), run_name="__main__")

    kept = [json.loads(line) for line in saved.read_text().splitlines()]
    dropped = [json.loads(line) for line in left.read_text().splitlines()]
    by_ifd = {row["id"] for row in dropped if row["dropped_for"] == "ifd"}
    assert {row["id"] for row in kept} | by_ifd == {0, 2} and len(kept) + len(by_ifd) == 2
    assert all(
        row["messages"][0]["role"] == "user" and row["language"] == "en" and row["scores"]["ifd"] for row in kept
    )
    told = [(row["id"], row["dropped_for"]) for row in dropped if row["dropped_for"] != "ifd"]
    assert sorted(told) == [(1, "nearly seen before"), (3, "refusal"), (4, "words repeated"), (5, "in de")]
