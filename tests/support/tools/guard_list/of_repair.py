"""Guards: repair and resharding."""

# ruff: noqa: E501 - the texts are lines of the code
from __future__ import annotations

from tests.support.tools.guard_list.guard import of

__all__ = ["MENDING", "REPAIR"]

FINISH = "tests/checkpoint/test_finish.py::"
MEND = "tests/checkpoint/test_mend.py::"
RESHARD = "tests/checkpoint/test_reshard.py::"

REPAIR = [
    of(
        "repair: every byte is read before the commit", "checkpoint/upkeep/repair.py",
        "        left = tuple(Left(fault.path, fault.what, remedy) for fault in faults)\n    if left",
        "        left = ()\n    if left",
        FINISH + "test_a_save_of_which_a_bit_is_wrong_is_not_committed",
    ),
    of(
        "repair: a claim that a killed repair left is released", "checkpoint/upkeep/repair.py",
        "        if claimed(group.storage, group.manifest.attempt):\n", "        if False:\n",
        FINISH + "test_a_commit_killed_at_any_call_makes_nothing_worse_and_a_second_one_finishes",
    ),
    of(
        "repair: the claim ends with the repair", "checkpoint/upkeep/repair.py",
        "            release(one.storage, one.attempt)\n", "            pass\n",
        FINISH + "test_parts_whose_coordinator_died_are_committed",
        "test_a_step_of_groups_is_committed_wherever_its_lead_died",
    ),
    of(
        "repair: the claim", "checkpoint/upkeep/repair.py",
        "            if not claim(one.storage, one.attempt):\n", "            if False:\n",
        FINISH + "test_a_session_that_wakes_up_at_any_moment_loses_nothing",
        "test_what_another_run_gave_up_is_left_to_it",
    ),
    of(
        "repair: a session looks for the claim before it takes files back", "checkpoint/commits/commit.py",
        "if (not raised and claimed(storage, attempt)) or max(", "if max(",
        FINISH + "test_a_session_that_wakes_up_at_any_moment_loses_nothing",
    ),
    of(
        "repair: a session keeps what it has committed", "checkpoint/commits/commit.py",
        "        elif not tokens:\n", "        else:\n",
        FINISH + "test_what_a_session_has_committed_it_does_not_take_back",
    ),
    of(
        "repair: the second look after the lease", "checkpoint/upkeep/repair.py",
        "        _refuse_changed(top, step, groups)\n", "",
        FINISH + "test_a_session_that_commits_while_the_bytes_are_read_is_not_overtaken",
    ),
    of(
        "repair: later leases, before and after the parts are read", "checkpoint/upkeep/repair.py",
        "            if (error := later_run(store, token, urls)) is not None:\n", "            if error := None:\n",
        FINISH + "test_a_run_that_takes_a_lease_meanwhile_ends_the_repair",
    ),
    of(
        "repair: a later lease is not overtaken", "checkpoint/upkeep/unfinished.py",
        "if _follows(one, last) and _newer(one, commit)]", "if _newer(one, commit)]",
        FINISH + "test_a_later_run_that_has_taken_a_lease_is_not_overtaken",
    ),
    of(
        "repair: the sweep leaves what is claimed", "checkpoint/commits/sweep.py",
        "        if not raise_fence(storage, attempt) and claimed(storage, attempt):\n",
        "        if not raise_fence(storage, attempt) and False:\n",
        FINISH + "test_a_sweep_leaves_what_a_repair_has_claimed",
    ),
    of(
        "repair: the number of a session", "checkpoint/upkeep/unfinished.py",
        "            return one.number > manifest.number\n", "            return True\n",
        FINISH + "test_a_lower_number_of_the_session_that_has_committed_is_over",
    ),
    of(
        "repair: an absent part", "checkpoint/upkeep/unfinished.py",
        "    if best.absent or best.damage:\n        return _incomplete([best], top)\n", "",
        FINISH + "test_a_save_of_which_a_file_is_missing_is_named",
        "test_forged_parts_are_refused_and_nothing_is_written",
    ),
    of(
        "repair: an absent part of a group", "checkpoint/upkeep/unfinished.py",
        "    if absent := [one for one in chosen if one.absent or one.damage]:\n", "    if absent := []:\n",
        FINISH + "test_a_group_that_lacks_a_part_keeps_the_step_uncommitted",
    ),
    of(
        "repair: a file that is missing or cut", "checkpoint/upkeep/unfinished.py",
        "                    if sizes.get(found) != size:\n", "                    if False:\n",
        FINISH + "test_a_save_of_which_a_file_is_missing_is_named",
    ),
    of(
        "repair: groups agree on step and kind", "checkpoint/upkeep/unfinished.py",
        "        if len(set(values.values())) > 1:\n", "        if False:\n",
        FINISH + "test_groups_that_do_not_agree_are_not_joined",
    ),
    of(
        "repair: a group without this number", "checkpoint/upkeep/unfinished.py",
        "    if empty := [subpath for subpath, group in zip(subpaths, here, strict=True) if not group]:\n",
        "    if empty := []:\n",
        FINISH + "test_groups_of_two_numbers_are_not_joined",
    ),
    of(
        "repair: a rank in two groups", "checkpoint/upkeep/unfinished.py",
        "    if len(set(ranks)) != len(ranks):\n        return Refusal(\"a rank is in two",
        "    if False:\n        return Refusal(\"a rank is in two",
        FINISH + "test_groups_that_share_a_rank_are_not_joined",
    ),
    of(
        "repair: the groups are those of the lease", "checkpoint/upkeep/unfinished.py",
        "    if last is not None and last.ranks and set(ranks) != last.ranks:\n", "    if False:\n",
        FINISH + "test_groups_of_other_ranks_than_the_lease_names_are_not_joined",
    ),
    of(
        "repair: a step that is recorded, or leases, tie the groups", "checkpoint/upkeep/unfinished.py",
        "    if chosen[0].step is None and not tied:\n", "    if False:\n",
        FINISH + "test_groups_that_nothing_ties_together_are_not_joined",
    ),
    of(
        "repair: two sessions that nothing orders", "checkpoint/upkeep/unfinished.py",
        "    if len({one.session for one in free}) > 1:\n        return _several(newer, top)\n", "",
        FINISH + "test_of_two_sessions_that_nothing_orders_none_is_chosen",
    ),
    of(
        "repair: without a lease nothing is guessed", "checkpoint/upkeep/unfinished.py",
        "        if not best.token or above is None:\n", "        if False:\n",
        FINISH + "test_without_a_lease_nothing_is_guessed",
    ),
    of(
        "repair: groups that no lease names", "checkpoint/upkeep/unfinished.py",
        "    if not found:\n        return _groups_unknown(top)\n", "    if not found:\n        return None\n",
        FINISH + "test_groups_that_no_lease_names_are_given_by_the_user",
    ),
    of(
        "repair: one group of a step, by the lease above", "checkpoint/upkeep/unfinished.py",
        '        if above is not None and above != "":\n', "        if False:\n",
        FINISH + "test_one_group_of_a_step_is_never_committed_alone",
    ),
    of(
        "repair: one group of a step, by its meshes", "checkpoint/upkeep/repair.py",
        "    if others := sorted(meshes - set(step.ranks)):\n", "    if others := sorted(meshes - meshes):\n",
        FINISH + "test_one_group_of_a_step_is_never_committed_alone",
    ),
    of(
        "repair: what a part's name says", "checkpoint/records/sealed.py",
        '    refuse_unlike(made, parsed, named, path, "the name of the file")\n', "",
        FINISH + "test_forged_parts_are_refused_and_nothing_is_written",
    ),
    of(
        "repair: a part's rank is of its group", "checkpoint/records/format.py",
        "        if self.rank not in self.group_ranks:\n", "        if False:\n",
        FINISH + "test_forged_parts_are_refused_and_nothing_is_written",
    ),
    of(
        "repair: a part's files are its own", "checkpoint/records/format.py",
        "        if file.name != data_name(attempt, rank, number):\n", "        if False:\n",
        FINISH + "test_forged_parts_are_refused_and_nothing_is_written",
    ),
    of(
        "repair: a forged table is damage", "checkpoint/upkeep/repair.py",
        "    except SENSELESS as error:  # what a rank", "    except ZeroDivisionError as error:  # what a rank",
        FINISH + "test_forged_parts_are_refused_and_nothing_is_written",
    ),
]  # fmt: skip

MENDING = [
    of(
        "mend: a donor's block is compared", "checkpoint/upkeep/mend.py",
        "return data if crc64(data) == value else None", "return data",
        MEND + "test_a_source_that_is_forged_gives_nothing",
    ),
    of(
        "mend: a donor's part is compared", "checkpoint/upkeep/mend.py",
        "            if right(data):\n                return data\n", "            if True:\n                return data\n",
        MEND + "test_a_source_that_is_forged_gives_nothing",
    ),
    of(
        "mend: what was written is read back", "checkpoint/upkeep/mend.py",
        "    if checksum_at(storage, name, storage.size(name)) != expected:\n", "    if False:\n",
        MEND + "test_a_disk_that_gives_other_bytes_back_is_told",
    ),
    of(
        "mend: no link is followed", "checkpoint/upkeep/mend.py",
        "    storage.refuse_links()\n    storage.discard", "    storage.discard",
        MEND + "test_several_groups_and_links",
    ),
    of(
        "mend: the file takes its name when it is whole", "checkpoint/upkeep/mend.py",
        "    writer = storage.create_file(name, size, replace=True)\n",
        "    storage.delete(name)\n    writer = storage.create_file(name, size, replace=True)\n",
        MEND + "test_a_mend_killed_at_any_call_makes_nothing_worse_and_a_second_one_finishes",
    ),
    of(
        "mend: what a killed repair began is removed", "checkpoint/upkeep/mend.py",
        "    storage.discard_unfinished([name])  # of a repair that was killed\n", "",
        MEND + "test_a_mend_killed_at_any_call_makes_nothing_worse_and_a_second_one_finishes",
    ),
    of(
        "mend: blocks of several donors", "checkpoint/upkeep/mend.py",
        "            if likely and donor.block(number, length, value) is not None:\n                return donor\n",
        "            return donor if likely and donor.block(number, length, value) is not None else None\n",
        MEND + "test_a_copy_that_is_damaged_elsewhere_gives_its_good_blocks",
    ),
    of(
        "mend: other steps are donors", "checkpoint/upkeep/repair.py",
        "others = [contents, *_readable(donors, contents), *_beside(contents)]",
        "others = [contents, *_readable(donors, contents)]",
        MEND + "test_equal_blocks_of_another_step_are_found_beside_it",
    ),
    of(
        "mend: other files of the checkpoint are donors", "checkpoint/upkeep/repair.py",
        "others = [contents, *_readable(donors, contents), *_beside(contents)]",
        "others = [*_readable(donors, contents), *_beside(contents)]",
        MEND + "test_a_replica_s_equal_file_is_found_in_the_checkpoint_itself",
    ),
    of(
        "mend: a file of which a block is nowhere stays", "checkpoint/upkeep/mend.py",
        "return self.data is not None or (bool(self.sums) and not self.missing)",
        "return self.data is not None or bool(self.sums)",
        MEND + "test_what_cannot_be_mended_is_named_with_rank_bytes_and_tensors",
    ),
    of(
        "mend: the checksums belong to the file", "checkpoint/upkeep/mend.py",
        "return -1 not in sums and hex64(combined(sums, record.size)) == record.crc64",
        "return -1 not in sums",
        "tests/checkpoint/test_mend.py",
    ),
    of(
        "reshard: a failed reshard leaves nothing", "checkpoint/upkeep/reshard.py",
        "            discard_attempt(storage, writer.attempt)\n            raise\n",
        "            raise\n",
        RESHARD + "test_what_cannot_be_is_refused_and_leaves_nothing",
    ),
    of(
        "reshard: one group of a step", "checkpoint/upkeep/reshard.py",
        "    catalogue.refuse_one_group()\n", "",
        RESHARD + "test_what_cannot_be_is_refused_and_leaves_nothing",
    ),
    of(
        "reshard: an empty target", "checkpoint/upkeep/reshard.py",
        "    refuse_not_empty(storage)\n", "",
        RESHARD + "test_what_cannot_be_is_refused_and_leaves_nothing",
    ),
]  # fmt: skip
