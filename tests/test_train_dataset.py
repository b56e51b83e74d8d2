"""Rows of every kind of file, one by one and without a network."""

import gzip
import io
import json
import sys

import pytest

from hispec.train import dataset
from hispec.train.dataset import find_source, mix

ROWS = [{"text": f"row {number}\u2028\n\"'\t, é"} for number in range(7)]


def rows_of(path):
    return [row for _, row in find_source(str(path)).rows()]


def write_as(folder, extension):
    path = folder / f"data{extension}"
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    if extension in (".jsonl", ".json"):
        path.write_text(lines, encoding="utf-8")
    elif extension == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif extension == "-list.json":
        path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8")
    else:
        import pandas

        frame = pandas.DataFrame(ROWS)
        {
            ".parquet": lambda: frame.to_parquet(path),
            ".csv": lambda: frame.to_csv(path, index=False),
            ".tsv": lambda: frame.to_csv(path, index=False, sep="\t"),
        }[extension]()
    return path


@pytest.mark.parametrize("extension", [".jsonl", ".jsonl.gz", ".json", "-list.json", ".parquet", ".csv", ".tsv"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, extension):
    assert rows_of(write_as(tmp_path, extension)) == ROWS


def test_a_text_file_gives_its_paragraphs(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("\none\ntwo\n\n \n\nthree", encoding="utf-8")
    assert [row["text"] for row in rows_of(path)] == ["one\ntwo", "three"]
    monkeypatch.setattr(dataset, "MAX_PARAGRAPH", 4)
    assert [row["text"] for row in rows_of(path)] == ["one", "two", "three"]


def test_folders_patterns_and_saved_sets(tmp_path):
    import datasets

    for name in ("b.jsonl", "a.jsonl", "c.md"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert [row["text"] for row in rows_of(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert [row["text"] for row in rows_of(tmp_path / "[b]*.jsonl")] == ["b.jsonl"]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    assert rows_of(tmp_path / "saved") == ROWS
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert rows_of(tmp_path / "one") == ROWS


class Counting(io.StringIO):
    """A file that counts the characters that were read."""

    num_read = 0

    def read(self, size=-1):
        text = super().read(size)
        self.num_read += len(text)
        return text

    def __next__(self):
        line = super().__next__()
        self.num_read += len(line)
        return line


@pytest.mark.parametrize("name", ["data.jsonl", "data-list.json"])
def test_rows_come_before_the_rest_is_read(tmp_path, monkeypatch, name):
    """The first row of a huge file comes at once, and what is broken behind a megabyte is named when it is met."""
    path = tmp_path / name
    rows = [json.dumps({"text": "x" * 1000}) for _ in range(1500)]
    path.write_text("[" + ",".join([*rows, "{"]) if "list" in name else "\n".join([*rows, "{"]))
    file = Counting(path.read_text())
    monkeypatch.setattr(dataset, "_open_text", lambda path: file)
    found = find_source(str(path)).rows()
    assert next(found)[1] == {"text": "x" * 1000}
    assert file.num_read < 100_000
    with pytest.raises(ValueError, match=rf"{name} (line|item) 1501 is not JSON"):
        list(found)


def test_the_name_of_a_source_tells_a_changed_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    name = find_source(str(path)).name
    assert find_source(str(path)).name == name
    path.write_text('{"text": "b"}\n')
    assert find_source(str(path)).name != name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{\n', r"a\.jsonl line 2 is not JSON"),
        ("a.jsonl", "[1]\n", r"line 1 is a JSON list; every row must be an object"),
        ("a.json", "[1]", r"item 1 is a JSON int"),
        ("a.json", '[{"a": 1}', r"item 2 is not JSON"),
        ("a.parquet", "?", r"a\.parquet cannot be read as parquet"),
        ("a.jsonl.gz", "?", r"cannot be read as UTF-8 text"),
        ("a.md", "?", r"tells no known format; give a file \(\.jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / name)


def test_what_is_not_there_is_named(tmp_path):
    for name in ("none.jsonl", "user/none.jsonl", "none", "a/b/c", "user/name:a:b:c"):
        with pytest.raises(ValueError, match=f"the data '{name}' does not exist; give a file"):
            find_source(name)
    with pytest.raises(ValueError, match="holds no data files"):
        find_source(str(tmp_path))


class Hub:
    """`datasets` with one data set of two splits, which is only ever streamed."""

    def load_dataset(self, repo, config, *, revision, streaming):
        assert streaming
        if config == "none":
            raise ValueError("BuilderConfig 'none' not found.\nAvailable: ['a']")
        return {
            "train": iter([{"text": f"{repo} {config} {revision} train"}]),
            "test": iter([{"text": f"{repo} {config} {revision} test"}]),
        }


def test_a_hub_id_names_config_split_and_revision(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", Hub())
    monkeypatch.setattr(dataset, "snapshot_download", lambda *args, **options: None)
    for name, text in (
        ("u/d", "u/d None None train"),
        ("u/d:c", "u/d c None train"),
        ("u/d:c:test", "u/d c None test"),
        ("u/d::test", "u/d None None test"),
        ("u/d@v1:c:test", "u/d c v1 test"),
    ):
        assert rows_of(name) == [{"text": text}]
        assert find_source(name).name == name
    with pytest.raises(ValueError, match=r"'u/d' cannot be read \(it has no split 'dev' but train, test"):
        rows_of("u/d:c:dev")
    with pytest.raises(ValueError, match=r"'u/d' cannot be read \(BuilderConfig 'none' not found. Available"):
        rows_of("u/d:none")


def test_hub_rows_are_streamed(monkeypatch):
    numbers = iter(range(10**9))

    class Endless:
        def load_dataset(self, *args, **options):
            return {"train": ({"text": str(number)} for number in numbers)}

    monkeypatch.setitem(sys.modules, "datasets", Endless())
    monkeypatch.setattr(dataset, "snapshot_download", lambda *args, **options: None)
    rows = find_source("u/d").rows()
    assert [next(rows)[1]["text"] for _ in range(3)] == ["0", "1", "2"]
    assert next(numbers) == 3


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def refuse(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(dataset, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"the data 'u/d' is .* the hub cannot be reached"):
        rows_of("u/d")


def test_mixing_keeps_every_row_and_follows_its_seed():
    rows = list(range(1000))
    mixed = [list(mix(rows, seed, size=50)) for seed in (1, 1, 2)]
    assert mixed[0] == mixed[1] != mixed[2]
    assert sorted(mixed[0]) == rows != mixed[0]
    assert list(mix([], 0)) == []
