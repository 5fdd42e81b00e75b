"""Guards: when a run saves, keeps, resumes and ends."""

# ruff: noqa: E501 - the texts are lines of the code
from __future__ import annotations

from tests.support.tools.guard_list.guard import Guard, of

__all__ = ["DECIDING", "ENDING", "KEEPING", "RESUMING", "SPACE"]

RETENTION = "tests/manager/test_retention.py::"
DOORS = "tests/integrations/test_doors_steps.py::"
KEEPER = "tests/storage/test_keeper.py::"
MEMORY = "tests/manager/test_memory.py::"
DAEMON = "tests/storage/test_managed_tier.py::"
MANAGER = "tests/manager/test_manager.py::"
SCHEDULE = "tests/manager/test_schedule.py::"
ROOM = "tests/manager/test_room.py::"
NOTICE = "tests/manager/test_notice.py::"
PROGRAM = "tests/manager/test_program.py::"

KEEPING = [
    of(
        "keep: the newest must be whole", "checkpoint/commits/run_directory.py",
        "        if not whole(last):\n            return []", "        if False:\n            return []",
        RETENTION + "test_nothing_goes_before_something_newer_is_whole",
    ),
    of(
        "keep: one that is not whole does not count", "manager/retention.py",
        "count -= whole(one)", "count -= 1",
        RETENTION + "test_one_that_is_not_whole_does_not_count_towards_n",
    ),
    of(
        "keep: the commit goes before its files", "checkpoint/commits/remove.py",
        """    for store, group in groups:
        store.delete(group.manifest)
    for store, _ in groups:  # a power failure could bring a manifest back without its files
        store.sync()
    for store, group in groups:
        store.delete_many([names[0] for _, names in group.parts])
    for store, group in groups:
        store.delete_many([name for _, names in group.parts for name in names[1:]])
""",
        """    for store, group in groups:
        store.delete_many([names[0] for _, names in group.parts])
    for store, group in groups:
        store.delete_many([name for _, names in group.parts for name in names[1:]])
    for store, group in groups:
        store.delete(group.manifest)
""",
        RETENTION + "test_a_deletion_killed_at_any_call_loses_nothing_else_and_is_finished",
    ),
    of(
        "keep: the record goes before the manifests", "checkpoint/commits/remove.py",
        """    if removal.record is not None:
        top.delete(removal.record)
        top.sync()
    for store, group in groups:
        store.delete(group.manifest)
""",
        """    for store, group in groups:
        store.delete(group.manifest)
    if removal.record is not None:
        top.delete(removal.record)
""",
        RETENTION + "test_a_deletion_killed_at_any_call_loses_nothing_else_and_is_finished",
    ),
    of(
        "keep: a deletion that was cut short is finished", "checkpoint/commits/run_directory.py",
        "        if policies and not self._finished:\n            self._finished = self.finish()\n",
        "",
        RETENTION + "test_a_deletion_killed_at_any_call_loses_nothing_else_and_is_finished",
    ),
    Guard(
        "keep: a deletion that failed is tried again",
        (
            (
                "smckpt/checkpoint/commits/run_directory.py",
                "            self._finished = self.finish()\n",
                "            self._finished = self.finish() or True\n",
            ),
        ),
        (RETENTION + "test_a_store_that_fails_is_asked_again_after_the_next_commit",),
    ),
    of(
        "keep: the run's name", "manager/retention.py",
        "self.run in (None, mark_of(one))", "True",
        RETENTION + "test_what_others_wrote_stays",
    ),
    of(
        "keep: a step that is a link is no step", "storage/disk/directory.py",
        "fd = os.open(name, _DIRECTORY | _PATH | os.O_NOFOLLOW, dir_fd=self.fd)",
        "fd = os.open(name, _DIRECTORY | _PATH, dir_fd=self.fd)",
        RETENTION + "test_a_link_is_not_followed", "test_a_step_whose_group_is_a_link_is_not_deleted_at_all",
    ),
    of(
        "keep: links are looked for before the mark", "checkpoint/commits/remove.py",
        "        group.storage.refuse_links()\n", "",
        RETENTION + "test_a_link_that_somebody_puts_there_during_a_deletion_is_not_followed",
    ),
    of(
        "keep: links are looked for in all groups before one is deleted", "checkpoint/commits/remove.py",
        "        store.refuse_links()\n    if removal.record",
        "        pass\n    if removal.record",
        RETENTION + "test_a_link_that_somebody_puts_there_during_a_deletion_is_not_followed",
    ),
    of(
        "keep: pins are looked for after the mark", "checkpoint/commits/remove.py",
        "    top.put_exclusive(mark, seal_json(body))\n    names = top.names()  # the one listing, after the mark\n",
        "    names = top.names()\n    top.put_exclusive(mark, seal_json(body))\n",
        RETENTION + "test_who_pins_just_before_the_mark_is_seen",
    ),
    of(
        "keep: pins are respected at all", "checkpoint/commits/remove.py",
        "        if until is None or until + _SKEW > time.time_ns():\n            held = name\n",
        "        if False:\n            held = name\n",
        RETENTION + "test_a_pinned_checkpoint_stays_until_its_reader_has_ended",
    ),
    of(
        "keep: a commit that took the step's place is not deleted", "checkpoint/commits/remove.py",
        "        if newest != [contents.identity] and contents_of(top).identity != contents.identity:",
        "        if False:",
        RETENTION + "test_a_step_that_was_saved_anew_meanwhile_is_not_deleted",
    ),
    of(
        "keep: a pin is refused during a deletion", "checkpoint/commits/remove.py",
        "    while _marks(storage):\n", "    while False:\n",
        RETENTION + "test_who_pins_what_is_being_deleted_is_told",
    ),
    of(
        "keep: a reader waits for a mark that goes", "checkpoint/commits/remove.py",
        "        if time.monotonic() > until or all(", "        if True or all(",
        RETENTION + "test_who_pins_beside_another_reader_waits_for_the_mark_to_go",
    ),
    of(
        "keep: a pin on what was deleted meanwhile is refused", "checkpoint/commits/remove.py",
        "    try:\n        still = contents_of(storage, wanted).identity\n", "    try:\n        still = wanted\n",
        RETENTION + "test_who_pins_what_was_deleted_meanwhile_is_told",
    ),
    of(
        "keep: a pin ends by itself", "checkpoint/commits/remove.py",
        "until + _SKEW > time.time_ns()", "True",
        RETENTION + "test_the_pin_of_a_reader_that_was_killed_ends",
    ),
    of(
        "keep: a pin that cannot be read holds", "checkpoint/commits/remove.py",
        "            held = name\n            continue\n", "            continue\n",
        RETENTION + "test_a_pin_or_a_mark_that_is_too_long_is_not_read",
    ),
    of(
        "keep: a removal by hand, too, respects pins", "integrations/replaced.py",
        "        log.info(\"%s stays: %s\", path, error)\n        return False\n", "        return True\n",
        DOORS + "test_the_trainers_rotation_leaves_a_pinned_step_with_all_that_is_beside_it",
    ),
    of(
        "keep: a removal that is called again removes no older commit", "checkpoint/commits/remove.py",
        "last is None or order_of(contents.identity) > order_of(last.identity)", "True",
        "tests/checkpoint/test_remove.py::test_a_removal_killed_at_any_deletion_leaves_a_whole_checkpoint_or_none",
    ),
    of(
        "keep: a policy of the user that fails keeps all", "checkpoint/commits/run_directory.py",
        "    if unknown := kept.difference(found):", "    if False:",
        RETENTION + "test_where_a_policy_of_the_user_fails_nothing_goes",
    ),
    of(
        "resume: the Trainer passes over a step that cannot be read", "checkpoint/commits/run_directory.py",
        "                    if error.of_store:\n                        raise\n", "                    raise\n",
        DOORS + "test_the_trainer_takes_an_older_step_than_one_that_cannot_be_read",
    ),
    of(
        "resume: the Trainer does not begin anew where it can read no step", "checkpoint/commits/run_directory.py",
        "        if sure and unread and not found:\n", "        if False:\n",
        DOORS + "test_the_trainer_does_not_begin_anew_where_a_folder_cannot_be_listed",
    ),
    of(
        "memory: a name of another user is no keeper", "storage/memory/wire.py",
        "            if user_of(made) != os.getuid():", "            if False:",
        KEEPER + "test_the_socket_of_another_user_is_no_keeper",
    ),
    of(
        "memory: a keeper answers who knows its secret", "storage/memory/wire.py",
        "    if not hmac.compare_digest(str(answer.get(\"proof\")), wanted):\n        return False\n", "",
        KEEPER + "test_who_does_not_know_the_secret_is_answered_nothing",
    ),
    of(
        "memory: a keeper shows that it knows its secret", "storage/memory/wire.py",
        "    if not hmac.compare_digest(answer, _proof(secret, \"keeper\", theirs, ours)):", "    if False:",
        KEEPER + "test_a_server_that_does_not_know_the_secret_is_not_believed",
    ),
    of(
        "memory: other hosts may not take descriptors", "storage/memory/keeper.py",
        "        elif local:\n            self._answer_own_host(", "        elif True:\n            self._answer_own_host(",
        KEEPER + "test_other_hosts_may_not_ask_for_what_is_this_hosts",
    ),
    of(
        "memory: a budget bounds a keeper", "storage/memory/keeper.py",
        "self._held + size > self.budget", "False",
        KEEPER + "test_the_budget_is_held_and_given_back",
    ),
    of(
        "memory: of all that create a name one succeeds", "storage/memory/keeper.py",
        "            kept = old is None or bool(asked.get(\"replace\"))", "            kept = True",
        KEEPER + "test_of_all_that_create_a_name_one_succeeds",
    ),
    of(
        "memory: a file has its copies before its name", "storage/memory/keeper.py",
        "                hosts = self._copied(asked, image, lambda: send(made, {}))", "                hosts = []",
        MEMORY + "test_a_host_dies_and_the_others_go_on_from_memory",
    ),
    of(
        "memory: a step that went with its host is not tried", "manager/memory.py",
        "            if lost:\n", "            if False:\n",
        MEMORY + "test_hosts_with_each_others_only_copies_die_and_the_job_begins_from_disk",
    ),
    of(
        "memory: a step that the run has left behind is not taken", "manager/memory.py",
        "            elif one in stay:\n", "            elif True:\n",
        MEMORY + "test_a_step_that_the_run_has_left_behind_does_not_come_back_with_its_host",
    ),
    of(
        "memory: a file whose copy went is copied again", "storage/memory/keeper.py",
        "            if holders[0] != own:\n", "            if True:\n",
        KEEPER + "test_a_file_whose_copy_went_with_its_host_is_copied_again",
    ),
    of(
        "memory: what somebody reads is not used again", "storage/memory/keeper.py",
        " and one.fd not in self._lent:", ":",
        KEEPER + "test_who_reads_a_file_that_is_deleted_reads_what_it_held",
    ),
    of(
        "memory: copies go to another domain first", "storage/memory/keeper.py",
        "(at in silent, peers[at].domain == domain)", "(at in silent, False)",
        KEEPER + "test_copies_go_to_another_domain_first",
    ),
    of(
        "memory: a keeper that hangs is asked last", "storage/memory/keeper.py",
        "            self._silent[at] = time.monotonic() + SILENT\n", "            pass\n",
        KEEPER + "test_a_keeper_that_hangs_costs_one_wait",
    ),
    of(
        "memory: while saves fail most are left out", "manager/memory.py",
        "        self._left_out = min(2**self._failed, MOST_LEFT_OUT) - 1\n",
        "        self._left_out = 0\n",
        MEMORY + "test_while_a_keeper_hangs_most_saves_are_left_out",
    ),
    of(
        "memory: a keeper that was killed is started again", "manager/memory.py",
        "        if self._failed and (error := self._join()[-1]):\n",
        "        if error := \"\":\n",
        MEMORY + "test_a_keeper_that_was_killed_is_started_again",
    ),
    of(
        "memory: where it is short one step stays", "manager/memory.py",
        "            self._policy.short = True\n", "",
        MEMORY + "test_with_room_for_two_steps_the_newest_one_stays_and_the_next_is_written",
    ),
    of(
        "memory: what was never committed is deleted", "manager/memory.py",
        "                    store.join(directory).delete_many(names)\n", "",
        MEMORY + "test_what_a_job_left_in_the_middle_of_a_save_is_deleted",
    ),
    of(
        "daemon: a blob came with the token of its note", "storage/memory/hyperpod.py",
        "yield answer if token == note.token else None", "yield answer",
        DAEMON + "test_what_the_daemon_has_lost_or_replaced_is_not_there",
    ),
    of(
        "daemon: its commits are no checkpoints of the other store", "storage/memory/hyperpod.py",
        '_OF_FILE, _NOTE = "kept-", "held-"', '_OF_FILE, _NOTE = "", "held-"',
        DAEMON + "test_readers_of_the_other_store_see_no_checkpoint_there",
    ),
    of(
        "daemon: a note leads to blobs alone", "storage/memory/hyperpod.py",
        "if not _NAMESPACE.fullmatch(self.namespace) or min(self.rank, self.step, self.size) < 0:",
        "if False:",
        DAEMON + "test_a_note_that_is_forged_reaches_nothing_and_runs_nothing",
    ),
    of(
        "memory: a keeper ends with its job", "storage/memory/keeper.py",
        "            if any(one in ends for one in ready):\n                return\n",
        "            ready = [one for one in ready if one not in ends]\n",
        MEMORY + "test_no_process_is_left_after_the_job",
    ),
    of(
        "keep: names in a mark", "checkpoint/commits/remove.py",
        "        name_of(self.manifest, \"manifest\")\n", "",
        RETENTION + "test_a_mark_that_leads_elsewhere_deletes_nothing",
    ),
    of(
        "keep: directories in a mark", "storage/base.py",
        'f"{name!r} leads out of the directory", remedy="use join_url", path=self.url',
        'f"{name!r} goes elsewhere", remedy="use join_url", path=self.url',
        RETENTION + "test_a_mark_that_leads_elsewhere_deletes_nothing",
    ),
    of(
        "keep: newest by time too, after a step back", "manager/retention.py",
        "for order in (by_step, by_time)", "for order in (by_step,)",
        RETENTION + "test_after_a_step_back_what_is_saved_since_stays",
    ),
]  # fmt: skip

RESUMING = [
    of(
        "resume: a bad step is given up", "manager/resume.py",
        "if isinstance(cause, bad):\n            return True",
        "if isinstance(cause, bad):\n            return False",
        MANAGER + "test_the_newest_is_bad_and_all_ranks_go_on_from_the_one_before",
    ),
    of(
        "resume: where nothing loads it is an error", "manager/resume.py",
        "        if lost:\n", "        if False:\n",
        MANAGER + "test_where_nothing_loads_the_run_does_not_begin_anew",
    ),
    of(
        "resume: a program that does not fit gets its error", "manager/resume.py",
        "            return True\n    return False", "            return True\n    return True",
        MANAGER + "test_a_program_that_does_not_fit_is_no_reason_to_take_an_older_step",
    ),
    of(
        "resume: what one rank cannot save reaches the others", "manager/manager.py",
        "            live = Failed(error)  #", "            raise  #",
        MANAGER + "test_what_one_rank_cannot_save_all_ranks_hear_of",
    ),
    of(
        "resume: another number of ranks loads by name", "manager/manager.py",
        'same = all(mark.get(name) == now[name] for name in ("ranks", "replicas", "degrees"))',
        "same = True",
        "tests/manager/test_ledger.py",
    ),
    of(
        "resume: random generators go on", "manager/manager.py",
        '        if self._random and own.get("random"):\n', "        if False:\n",
        PROGRAM + "test_all_of_it_is_exact",
    ),
    of(
        "resume: a failed request to S3 is sent again", "storage/s3/requests.py",
        "if tries > self.config.retries or", "if True or",
        "tests/manager/test_s3.py",
    ),
]  # fmt: skip

DECIDING = [
    of(
        "when: a rank waits for rank 0's decision", "manager/schedule.py",
        "        elif step > self._plan.settled:\n            self._wait(step)\n", "",
        SCHEDULE + "test_ranks_of_different_speed_save_the_same_steps",
    ),
    of(
        "when: the wait for rank 0 ends", "manager/schedule.py",
        "                    if left <= 0:\n", "                    if False:\n",
        SCHEDULE + "test_ranks_of_different_speed_save_the_same_steps",
    ),
    of(
        "when: the interval is as long as a save", "manager/schedule.py",
        "ChosenInterval(max(best, write), why)", "ChosenInterval(best, why)",
        SCHEDULE + "test_no_save_begins_before_the_last_one_has_ended",
    ),
    of(
        "when: an end by signal is no failure", "manager/record.py",
        'failed = _manager_of(found.metadata).get("ended") is None', "failed = True",
        SCHEDULE + "test_the_failures_of_a_run_stand_in_its_manifests",
    ),
    of(
        "when: a save by hand counts", "manager/schedule.py",
        "                self._since = time.monotonic()\n", "                pass\n",
        SCHEDULE + "test_a_save_by_hand_counts",
    ),
    of(
        "when: a loop may ask at some steps only", "manager/schedule.py",
        "any(asked < save <= step or save == step", "any(save == step",
        SCHEDULE + "test_a_loop_that_does_not_ask_at_each_step_saves_too",
    ),
    of(
        "when: failures that are allowed", "engine/saving/queue.py",
        "tolerated = self._failures <= job.request.options.max_consecutive_failures", "tolerated = False",
        MANAGER + "test_failures_that_are_allowed_end_no_run",
    ),
]  # fmt: skip

SPACE = [
    of(
        "space: a step that does not fit is refused", "manager/room.py",
        "    if step > room.nbytes:\n", "    if False:\n",
        ROOM + "test_a_step_that_does_not_fit_is_refused_before_anything_is_written",
    ),
    of(
        "space: one step more than the rules keep", "manager/room.py",
        "needed = (stay + 1) * step", "needed = stay * step",
        ROOM + "test_what_the_rules_keep_must_fit_too",
    ),
    of(
        "space: what this run has saved counts as free", "manager/room.py",
        "if needed > room.nbytes + saved():", "if needed > room.nbytes:",
        ROOM + "test_the_best_are_kept_too_and_what_this_run_has_saved_may_go",
    ),
    of(
        "space: a file system without a size", "manager/room.py",
        "    if not stats.f_blocks:\n        return None\n", "",
        ROOM + "test_a_file_system_without_a_size_tells_nothing",
    ),
    of(
        "space: the quota", "manager/room.py",
        "    if quota is not None:\n", "    if False:\n",
        ROOM + "test_the_smaller_of_quota_and_file_system_counts",
    ),
]  # fmt: skip

ENDING = [
    of(
        "end: a signal on one rank reaches all", "manager/notice.py",
        'return transport.keys.peek("notice") if isinstance(transport, OverStore) else None', "return None",
        NOTICE + "test_a_signal_on_one_rank_is_enough",
    ),
    of(
        "end: the furthest step counts", "manager/notice.py",
        "lambda brought: max(brought().values())", "lambda brought: min(brought().values())",
        NOTICE + "test_a_signal_on_one_rank_is_enough",
    ),
    of(
        "end: a loop waits for the decision", "manager/notice.py",
        "            self._decided.wait()\n", "            pass\n",
        NOTICE + "test_a_manager_that_is_closed_leaves_no_loop_waiting",
    ),
    of(
        "end: a dead rank is named before the time is over", "manager/notice.py",
        "return max(grace - max(_SAVE_FACTOR * self.save_seconds, grace / 3), grace / 10)", "return grace * 3",
        NOTICE + "test_a_rank_that_is_dead_holds_nobody_up",
    ),
    of(
        "end: the process ends when the time is over", "manager/notice.py",
        '        self._end("the time is over")\n', "",
        NOTICE + "test_an_open_manager_ends_the_process_when_the_time_is_over",
    ),
    of(
        "end: a thread that fails ends the process", "manager/notice.py",
        '                self._end(f"the ranks cannot agree on a last step: {error}")\n', "                pass\n",
        NOTICE + "test_a_thread_that_fails_leaves_no_loop_waiting",
    ),
    of(
        "end: a thread that fails releases the loop", "manager/notice.py",
        "            self._decided.set()\n", "            pass\n",
        NOTICE + "test_a_thread_that_fails_leaves_no_loop_waiting",
        "test_a_manager_that_is_closed_leaves_no_loop_waiting",
    ),
    of(
        "end: a closed manager ends no process", "manager/notice.py",
        "            threading.main_thread().join()\n", "            pass\n",
        NOTICE + "test_a_manager_that_is_closed_ends_no_process",
    ),
]  # fmt: skip
