"""Files as people write them, and files made to hurt."""

import pytest

from roost import ComponentPlacement, ConfigError, PlacementError, Topology, load_config

JOB = "cluster: {component_placement: {actor: 0-3}}\n"
ONE = Topology.parse("1x8")


def refused(path):
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(str(caught.value)) < 20_000
    return caught.value


# Files that cannot be read ----------------------------------------------------------------


def test_missing_file(tmp_path):
    error = refused(tmp_path / "nothing.yaml")
    assert "nothing.yaml" in str(error)


def test_directory(tmp_path):
    assert str(tmp_path) in str(refused(tmp_path))


def test_names_that_are_none():
    refused("a\0b.yaml")
    refused("")


@pytest.mark.parametrize("text", ["", " ", "\n\n", "# only a comment\n", "---\n", "---\n...\n", "null\n", "~"])
def test_empty_files(write, text):
    error = refused(write(text.encode()))
    assert "empty" in str(error) or "no values" in str(error)


@pytest.mark.parametrize("text", ["just words", "- a\n- b\n", "3", "'quoted'", "true"])
def test_files_that_hold_no_mapping(write, text):
    assert "mapping" in str(refused(write(text)))


@pytest.mark.parametrize(
    "text",
    [
        "cluster: {",
        "cluster: [1, 2",
        "a: b: c",
        "a: 'open",
        "@",
        "a: %x",
        "{a: 1}}",
        "a:\n  b: 1\n c: 2",
        "a: &",
        "*x",
        "a: *x",
    ],
)
def test_files_that_are_not_yaml(write, text):
    error = refused(write(text))
    assert error.codes == ("C104",)
    assert error.findings[0].place.line >= 1


def test_not_yaml_points_at_the_place(write):
    path = write(b"cluster:\n  num_nodes: 1\n  bad: [1, 2}\n")
    finding = refused(path).findings[0]
    assert (finding.place.file, finding.place.line) == (str(path), 3)


@pytest.mark.parametrize(
    "text", [b"cluster:\n\tnum_nodes: 1\n", b"cluster:\n  a: 1\n\tb: 2\n", b"\tcluster: 1\n", b"a:\n  - b\n\t- c\n"]
)
def test_tabs(write, text):
    error = refused(write(text))
    assert "tab" in str(error)
    assert error.findings[0].place.source[error.findings[0].place.column - 1] == "\t"


def test_a_tab_inside_a_text_is_fine(write):
    path = write(b"cluster:\n  component_placement:\n    actor: 0-1\t,2-3\t# a comment\n")
    assert ComponentPlacement(load_config(path), ONE).get_world_size("actor") == 4


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a: \xff", JOB.encode("utf-16"), b"\x80\x81\x82", b"a: \xc3("])
def test_not_utf_8(write, data):
    assert "UTF-8" in str(refused(write(data)))


@pytest.mark.parametrize("data", [b"a: \x00", b"a: \x07b", b"\x00" * 100, b"a: \x1b[31m"])
def test_control_characters(write, data):
    error = refused(write(data))
    assert error.codes == ("C104",)
    assert not set(str(error)) & {"\x00", "\x07", "\x1b"}


def test_a_byte_order_mark_is_fine(write):
    path = write(b"\xef\xbb\xbf" + JOB.encode())
    assert ComponentPlacement(load_config(path), ONE).get_world_size("actor") == 4


def test_windows_line_ends_are_fine(write):
    path = write(b"cluster:\r\n  component_placement:\r\n    actor: 0-3:0-2\r\n")
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(load_config(path), ONE)
    assert caught.value.findings[0].place.line == 3
    assert "\r" not in str(caught.value)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_places_are_right_after_odd_line_ends(write, separator):
    """What counts as a line for YAML and for Python differs; the line that is shown must be the culprit's."""
    path = write(f'note: "a{separator}b"\ncluster:\n  component_placement:\n    actor: 0-99\n'.encode())
    try:
        config = load_config(path)
    except ConfigError:
        return  # YAML does not allow that character at all
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(config, ONE)
    assert "actor: 0-99" in caught.value.findings[0].place.source


# Files made to hurt -----------------------------------------------------------------------


def test_a_file_beyond_the_limit(write):
    path = write(b"# " + b"x" * (10 * 2**20) + b"\n" + JOB.encode())
    assert "10 MiB" in str(refused(path))


def test_a_file_at_the_limit_is_read(write):
    padding = 10 * 2**20 - len(JOB) - 3
    path = write(b"# " + b"x" * padding + b"\n" + JOB.encode())
    assert path.stat().st_size == 10 * 2**20
    assert load_config(path).cluster.component_placement.actor == "0-3"


def test_a_billion_laughs(write):
    lines = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "expands" in str(refused(write("\n".join(lines))))


def test_a_billion_laughs_by_merge_keys(write):
    lines = ["a0: &a0 {k0: 1, k1: 2}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 10)]
    refused(write("\n".join(lines)))


def test_an_alias_that_contains_itself(write):
    refused(write("a: &a [*a]"))
    refused(write("a: &a {b: *a}"))


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 10_000, "a: " + "[" * 200 + "]" * 200, "- " * 5000])
def test_deep_nesting(write, text):
    refused(write(text))


def test_deep_nesting_in_blocks(write):
    refused(write("\n".join(" " * i + "a:" for i in range(1000)).encode()))


def test_more_than_a_million_values_are_refused(write):
    refused(write(b"x: [" + b"1," * 1_000_001 + b"]"))


def test_a_very_long_line_is_shown_in_part(write):
    path = write(b"cluster: {component_placement: {actor: '" + b"0," * 50_000 + b"x'}}")
    with pytest.raises(PlacementError) as caught:
        ComponentPlacement(load_config(path), ONE)
    assert max(map(len, str(caught.value).splitlines())) < 400


# Keys and values --------------------------------------------------------------------------


def test_every_duplicate_key_is_reported(write):
    path = write("""\
        cluster:
          num_nodes: 1
          component_placement: {actor: 0-3, actor: 4-7}
          num_nodes: 2
        cluster: 3
    """)
    error = refused(path)
    assert error.codes == ("C107",) * 3
    assert [finding.place.line for finding in error.findings] == [3, 4, 5]
    assert "line 2" in str(error.findings[1])


@pytest.mark.parametrize("keys", ["4090: 1, '4090': 2", "a: 1, 'a': 2", "? a\n: 1\n, a: 2"])
def test_duplicate_keys_in_other_clothes(write, keys):
    assert "C107" in refused(write(f"x: {{{keys}}}")).codes


@pytest.mark.parametrize("key", ["[a, b]", "{a: 1}", "*x"])
def test_keys_that_are_no_words(write, key):
    refused(write(f"x: &x a\ny:\n  ? {key}\n  : 1\n"))


@pytest.mark.parametrize("key", ["4090", "1.5", "true", "null", "~", ".nan", "2024-01-01"])
def test_keys_are_texts(write, key):
    config = load_config(write(f"x: {{{key}: 1}}\n"))
    assert list(config.x) == [key]


@pytest.mark.parametrize("key", ["4090", "1.5", "true", "null", "~", "", "yes no", ".nan"])
def test_keys_that_are_no_component(write, key):
    path = write(f"cluster:\n  component_placement:\n    {key}: 0-3\n")
    with pytest.raises((PlacementError, ConfigError)):
        ComponentPlacement(load_config(path), ONE)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("1", 1),
        ("-1", -1),
        ("007", 7),
        ("0x1f", 31),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("true", True),
        ("Yes", True),
        ("off", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("3:0", "3:0"),
        ("1:30", "1:30"),
        ("0_7", "0_7"),
        ("190:20:30", "190:20:30"),
        ("0-7", "0-7"),
        ("2024-01-01", "2024-01-01"),
        (".inf", float("inf")),
        ("!!str 4090", "4090"),
        ("!!int 7", 7),
        ("9" * 500, "9" * 500),
    ],
)
def test_scalars(write, scalar, value):
    found = load_config(write(f"x: {scalar}\n")).x
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_float(write):
    value = load_config(write("x: .nan\n")).x
    assert value != value


@pytest.mark.parametrize(
    "where", ["num_nodes: .nan", "node_groups: [{label: a, node_ranks: .nan}]", "auto_scheduler: .nan"]
)
def test_nan_is_no_number_of_anything(write, where):
    path = write(f"cluster:\n  {where}\n  component_placement: {{actor: 0}}\n")
    with pytest.raises(ConfigError, match="nan"):
        ComponentPlacement(load_config(path), ONE)


@pytest.mark.parametrize("key", ["gpu_share", "cpus", "memory_gib"])
@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e400", "-1"])
def test_numbers_that_are_none(write, key, value):
    path = write(f"cluster: {{component_placement: {{actor: {{placement: 0, {key}: {value}}}}}}}\n")
    with pytest.raises(ConfigError, match=key):
        ComponentPlacement(load_config(path), ONE)


@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.system [true]", "!custom x", "!!binary aGk=", "!!timestamp 2024-01-01", "!!set {a}"],
)
def test_tags_are_refused_and_never_run(write, tag):
    assert "tag" in str(refused(write(f"x: {tag}\n")))


def test_anchors_and_aliases(write):
    path = write("""\
        x: &all 0-3
        cluster:
          component_placement:
            actor: *all
            rollout: &more {placement: 4-7, gpu_share: 0.5}
            reward: *more
    """)
    placed = ComponentPlacement(load_config(path), ONE)
    assert [placed.get_hardware_ranks(name)[0] for name in placed.components] == [0, 4, 4]


def test_merge_keys(write):
    config = load_config(
        write("""\
        one: &one {a: 1, b: 1}
        two: &two {b: 2, c: 2}
        merged: {<<: [*one, *two], c: 3}
        single: {a: 9, <<: *one}
        quoted: {"<<": 5}
    """)
    )
    assert dict(config.merged) == {"a": 1, "b": 1, "c": 3}
    assert dict(config.single) == {"a": 9, "b": 1}
    assert dict(config.quoted) == {"<<": 5}


@pytest.mark.parametrize("value", ["3", "[1]", "text", "null"])
def test_merge_keys_take_mappings(write, value):
    refused(write(f"a: {{<<: {value}}}"))


def test_several_documents(write):
    assert "document" in str(refused(write(JOB + "---\n" + JOB)))


def test_one_document_with_marks_around_it(write):
    path = write(f"%YAML 1.1\n---\n{JOB}...\n")
    assert load_config(path).cluster.component_placement.actor == "0-3"


def test_all_problems_of_a_file_at_once(write):
    path = write("a: 1\na: 2\nb: !x 3\nc: {<<: 4}\n")
    assert set(refused(path).codes) == {"C107", "C109"}
    assert len(refused(path).findings) == 3
