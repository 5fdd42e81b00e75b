"""Locations are cut and joined without losing a byte."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smckpt.errors import UsageError
from smckpt.storage.urls import (
    bucket_url,
    build_s3_url,
    common_parent,
    is_s3_url,
    join_url,
    local_path,
    normal_url,
    parent_url,
    parse_s3_url,
    relative_url,
)

keys = st.text(alphabet="ab/.% ", max_size=12).filter(lambda key: ".." not in key.split("/"))
names = st.text(alphabet="ab.%-_ é", min_size=1, max_size=5).filter(lambda n: n not in (".", ".."))


@given(keys, keys)
def test_the_rest_below_a_prefix_joins_back_byte_for_byte(prefix: str, rest: str) -> None:
    base = normal_url(f"s3://bucket/{prefix}")
    url = normal_url(base + rest)
    if url == base:
        assert relative_url(url, base) == ""
    assert join_url(base, relative_url(url, base)) == url
    assert normal_url(url) == url


@given(st.lists(names, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=4))
def test_the_rest_below_a_directory_joins_back(above: list[str], below: list[str]) -> None:
    base = "/" + "/".join(above)
    url = base + "/" + "/".join(below)
    assert relative_url(url, base) == "/".join(below)
    assert join_url(base, relative_url(url, base)) == url
    assert parent_url(join_url(base, below[0])) == base


@given(st.lists(keys, min_size=1, max_size=3))
def test_a_common_parent_holds_every_prefix(prefixes: list[str]) -> None:
    urls = [f"s3://bucket/x{prefix}" for prefix in prefixes]
    parent = common_parent(urls)
    for url in urls:
        assert normal_url(url).startswith(parent) and normal_url(url) != parent
        assert join_url(parent, relative_url(url, parent)) == normal_url(url)


def test_the_parent_of_groups_is_the_deepest_proper_one() -> None:
    assert common_parent(["/ckpt/tp0/pp0", "/ckpt/tp0/pp1"]) == "/ckpt/tp0"
    assert common_parent(["/ckpt/tp0", "/ckpt/tp01"]) == "/ckpt"
    assert common_parent(["/ckpt/a", "/ckpt/a/b"]) == "/ckpt"
    assert common_parent(["/ckpt/a"]) == "/ckpt"
    assert common_parent(["/a", "/b"]) == "/"
    assert common_parent(["s3://b/run/tp0", "s3://b/run/tp1/"]) == "s3://b/run/"
    assert common_parent(["s3://b/tp0", "s3://b/tp1"]) == "s3://b/"


def test_parents_end_at_the_root_and_at_the_bucket() -> None:
    assert parent_url("/") == "/"
    assert parent_url("s3://b/a//c") == "s3://b/a//"
    assert parent_url(parent_url("s3://b/a//c")) == "s3://b/a/"
    with pytest.raises(UsageError, match="a bucket has no parent"):
        parent_url("s3://b/")


def test_groups_in_two_places_have_no_common_parent() -> None:
    for urls in (["s3://a/x", "s3://b/x"], ["s3://a/x", "/x"], ["s3://a/x", "msc://a/x"]):
        with pytest.raises(UsageError, match="no common parent"):
            common_parent(urls)
    with pytest.raises(UsageError):
        common_parent([])


@given(keys, keys)
def test_the_way_from_one_prefix_to_another_joins_back(one: str, other: str) -> None:
    here, there = f"s3://bucket/{one}", f"s3://bucket/{other}"
    assert join_url(here, relative_url(there, here)) == normal_url(there)


def test_a_way_goes_up_to_the_common_parent() -> None:
    assert relative_url("/ckpt/record", "/ckpt/tp0/pp0") == "../../record"
    assert join_url("/ckpt/tp0/pp0", "../../record") == "/ckpt/record"
    assert relative_url("/ckpt", "/ckpt/tp0") == ".." and join_url("/ckpt/tp0", "..") == "/ckpt"
    assert relative_url("s3://b/ckpt/tp1", "s3://b/ckpt/tp0") == "../tp1"
    assert join_url("s3://b/ckpt/tp0", "../..") == "s3://b/"
    with pytest.raises(UsageError, match="a bucket has no parent"):
        join_url("s3://b/ckpt", "../../x")
    with pytest.raises(UsageError, match=r'named "\.\."'):
        relative_url("s3://b/a/../c", "s3://b/a")


@pytest.mark.parametrize("rel", ["a/../../x", "/etc", "a//b", "a/", ".", "./a", "a/..", "a\0"])
def test_an_untidy_way_from_a_manifest_is_refused(rel: str) -> None:
    with pytest.raises(UsageError, match="is not a relative path"):
        join_url("/ckpt", rel)


def test_there_is_no_way_between_stores_and_buckets() -> None:
    for url, base in (("/a", "s3://a"), ("s3://a/x", "s3://b/x"), ("msc://a/x", "s3://a/x")):
        with pytest.raises(UsageError, match="there is no relative path"):
            relative_url(url, base)


def test_file_urls_and_paths_become_absolute_paths() -> None:
    assert local_path("file:///a/b%20c/") == "/a/b c"
    assert local_path("file://localhost/a") == "/a"
    assert local_path("a/../b/") == str(Path.cwd() / "b")
    assert relative_url("file:///a/b", "/") == "a/b"
    for url in ("", "file://host/a", "file:a\0", "s3://b/a", "file://"):
        with pytest.raises(UsageError):
            local_path(url)


def test_a_url_that_lost_a_slash_is_refused_and_no_other_path_with_a_colon() -> None:
    for lost in (str(PurePosixPath("s3://b/a")), os.path.abspath("s3://b/a"), "file:/a", "gs:/b"):
        with pytest.raises(UsageError, match="lost a slash"):
            normal_url(lost)
    for path in ("/a:/b", "/runs:3/s3", "/logs3:/a", "/a/s3:b", "s3:"):
        assert local_path(path) == os.path.abspath(path)


@given(st.sampled_from(["b", "my-bucket"]), keys)
def test_bucket_and_key_of_a_url_are_what_they_are(bucket: str, key: str) -> None:
    url = build_s3_url(bucket, key)
    assert url == f"s3://{bucket}/{key}"
    assert is_s3_url(url)
    assert parse_s3_url(url) == (bucket, key)


def test_a_key_may_begin_with_a_slash_and_a_bucket_may_stand_alone() -> None:
    assert parse_s3_url("s3://b//opt/ml/x") == ("b", "/opt/ml/x")
    assert parse_s3_url("s3://b") == parse_s3_url("S3://b/") == ("b", "")
    assert not is_s3_url(Path("/x"))


@pytest.mark.parametrize("url", ["", "/run", "s3:/b/k", "s3://", "s3:///key", "https://b/k"])
def test_what_is_no_url_of_s3_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"write s3://bucket/prefix"):
        parse_s3_url(url)
    for bucket in ("", "a/b"):
        with pytest.raises(UsageError, match="not a bucket name"):
            build_s3_url(bucket)


def test_a_relative_path_is_refused_where_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="working directory was removed.*absolute"):
        normal_url("checkpoints")
    assert normal_url("/checkpoints") == "/checkpoints"


def test_the_bucket_is_the_same_for_all_that_lies_in_it_and_a_path_has_none() -> None:
    assert {bucket_url(f"S3://b/{key}") for key in ("", "run", "run//x/")} == {"s3://b"}
    assert [bucket_url(path) for path in ("", "/run", "run", "file:///run")] == [""] * 4
