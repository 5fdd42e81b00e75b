"""Guards of what follows a run and of what is published to servers."""

from __future__ import annotations

from tests.support.guard_list.guard import of

FOLLOW = "tests/cli/test_follow.py::"
PUBLISH = "tests/translate/test_publish.py::"

PUBLISHED = [
    of(
        "follow: the step that is read is pinned",
        "manager/follow.py",
        "with pinned(found, seconds=_PIN, **options):",
        "if True:",
        FOLLOW + "test_a_run_does_not_delete_the_step_that_is_read",
    ),
    of(
        "follow: what is exported stays",
        "manager/follow.py",
        "if _recorded(target) == found.identity:",
        "if False:",
        FOLLOW + "test_what_is_exported_stays_and_what_a_kill_left_is_made_anew",
    ),
    of(
        "follow: the record names the commit",
        "manager/follow.py",
        "if _recorded(target) == found.identity:",
        "if _recorded(target):",
        FOLLOW + "test_a_step_that_is_saved_anew_replaces_its_export",
    ),
    of(
        "follow: a step that goes is left out",
        "manager/follow.py",
        "    except CheckpointNotFoundError as error:",
        "    except ZeroDivisionError as error:",
        FOLLOW + "test_a_step_that_goes_first_is_left_out_and_a_bad_one_fails_alone",
    ),
    of(
        "follow: exports do not lie in checkpoints",
        "manager/follow.py",
        "if base == there:",
        "if False:",
        FOLLOW + "test_the_exports_may_not_lie_in_the_checkpoints",
    ),
    of(
        "publish: bytes that change while they are published",
        "translate/publish.py",
        "if crc64(view) != crc:",
        "if False:",
        PUBLISH + "test_bytes_that_change_while_they_are_published_publish_nothing",
    ),
    of(
        "publish: two at one moment do not both count",
        "translate/publish.py",
        "if not self.storage.put_exclusive(MANIFEST, sealed):",
        "if self.storage.put(MANIFEST, sealed):",
        PUBLISH + "test_two_publishes_at_one_moment_do_not_both_count",
    ),
    of(
        "publish: another header is no delta",
        "translate/publish.py",
        'if "" in file.tensors or (file.size, file.header) != (was.size, was.header):',
        'if "" in file.tensors or file.size != was.size:',
        PUBLISH + "test_names_that_change_places_of_one_size_are_not_mixed_up",
    ),
    of(
        "publish: what went is told",
        "translate/publish.py",
        "        self.removed = tuple(sorted(old.keys() - scanned.keys()))",
        "        self.removed = ()",
        PUBLISH + "test_files_and_shapes_may_come_go_and_change",
    ),
    of(
        "publish: what is no whole model is refused",
        "translate/publish.py",
        "if unfinished or folders or not any",
        "if folders or not any",
        PUBLISH + "test_what_is_no_whole_model_is_refused",
    ),
    of(
        "publish: a chain ends",
        "translate/publish.py",
        "len(chain) >= full_every",
        "False",
        PUBLISH + "test_after_so_many_a_publish_is_full_and_old_chains_go",
    ),
    of(
        "publish: old chains go",
        "translate/publish.py",
        "        if full:\n            _delete_old",
        "        if False:\n            _delete_old",
        PUBLISH + "test_after_so_many_a_publish_is_full_and_old_chains_go",
    ),
    of(
        "publish: the last chain but one stays",
        "translate/publish.py",
        "kept = found is not None and found.base is None",
        "kept = True",
        PUBLISH + "test_after_so_many_a_publish_is_full_and_old_chains_go",
    ),
    of(
        "apply: a changed byte of a delta",
        "translate/apply.py",
        "if crc64(data) != tensor.blocks[number]:",
        "if False:",
        PUBLISH + "test_a_changed_byte_of_a_delta_is_refused_and_the_old_model_stays",
    ),
    of(
        "apply: a base that somebody changed",
        "translate/apply.py",
        "if (size, value) != (file.size, file.crc64):",
        "if False:",
        PUBLISH + "test_a_directory_that_somebody_changed_is_no_base",
    ),
    of(
        "apply: two to one directory",
        "translate/apply.py",
        "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "            pass",
        PUBLISH + "test_two_may_not_apply_to_one_directory",
    ),
    of(
        "apply: a base of another root",
        "translate/apply.py",
        "if _record_of(directory := os.path.join(place, publish.folder)) == publish.identity",
        "if (directory := os.path.join(place, publish.folder)) and os.path.exists(directory)",
        PUBLISH + "test_a_host_of_another_root_takes_nothing_from_its_base",
    ),
    of(
        "apply: the served directory stays",
        "translate/apply.py",
        "    older = [name for name in applied if name != folder]",
        "    older = list(applied)",
        PUBLISH + "test_old_directories_go_and_the_served_one_stays",
    ),
    of(
        "apply: a half removed directory has no record",
        "translate/apply.py",
        "            os.unlink(os.path.join(place, name, RECORD))",
        "            pass",
        PUBLISH + "test_a_half_removed_directory_is_made_anew",
    ),
    of(
        "publish: a chain follows its bases",
        "translate/published.py",
        "if chain and chain[0].base != found.identity:",
        "if False:",
        PUBLISH + "test_a_forged_manifest_is_refused",
    ),
    of(
        "publish: a forged name stays in its directory",
        "translate/published.py",
        'if not isinstance(name, str) or name in (".", "..") or not _NAME.fullmatch(name):',
        "if False:",
        PUBLISH + "test_a_forged_manifest_is_refused",
    ),
    of(
        "publish: a forged range",
        "translate/published.py",
        "if not begin <= end <= size or",
        "if",
        PUBLISH + "test_a_forged_table_of_a_full_publish_is_refused",
    ),
    of(
        "publish: a forged block",
        "translate/published.py",
        "if any(block >= count for block in blocks) or len(blocks) != len(numbers):",
        "if False:",
        PUBLISH + "test_a_forged_table_of_a_full_publish_is_refused",
    ),
    of(
        "publish: a delta of a tensor that its base lacks",
        "translate/published.py",
        "if was is None or (was.begin, was.end) != (new.begin, new.end):",
        "if False:",
        PUBLISH + "test_a_forged_manifest_is_refused",
    ),
]
