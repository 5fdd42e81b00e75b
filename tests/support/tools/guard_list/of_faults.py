"""Guards: faults of machines, ranks, jobs and clocks."""

# ruff: noqa: E501 - the texts are lines of the code
from __future__ import annotations

from tests.support.tools.guard_list.guard import of

__all__ = [
    "DISKS",
    "FORKED",
    "HANGING",
    "LATE",
    "SILENT",
    "SMALL",
    "TABLES",
    "TWO_JOBS",
    "UPGRADED",
    "WRONG_CLOCKS",
]

GATHER = "tests/checkpoint/test_gather.py::"
RETENTION = "tests/manager/test_retention.py::"
ALARMS = "tests/engine/test_alarms.py::"
OVERLAP = "tests/engine/test_overlap.py::"
STAGING = "tests/staging/test_overlap.py::"
DIGEST = "tests/staging/test_digest.py::"
DISK = "tests/engine/test_faulty_disk.py::"
MANAGER_DISK = "tests/manager/test_faulty_disk.py::"
FORKS = "tests/engine/test_forks.py::"
UPGRADE = "tests/engine/test_upgrade.py::"
RESOURCES = "tests/engine/test_resources.py::"
RANKS = "tests/engine/test_ranks.py::"
WORKER = "tests/engine/test_worker.py::"
CLOCKS = "tests/manager/test_clocks.py::"
JOBS = "tests/manager/test_two_jobs.py::"
ABSENT = "tests/manager/test_absent.py::"

TABLES = [
    of(
        "tables: a table that a part names is that of the digest",
        "checkpoint/commits/gather.py",
        "            if digest is not None and digests.get(owner) != digest:\n",
        "            if owner not in self._tables:\n",
        GATHER + "test_a_part_that_names_no_rank_with_this_table_is_refused",
    ),
    of(
        "tables: a rank that names a table has its rows",
        "checkpoint/commits/gather.py",
        "            if not self._merger.same(rank, layout):\n",
        "            if rank == owner and not self._merger.same(rank, layout):\n",
        GATHER + "test_rows_that_some_ranks_lack_name_the_ranks_that_have_them",
    ),
    of(
        "tables: a rank of a mesh that lacks its shard is refused",
        "checkpoint/commits/gather.py",
        '    _check_shards(storage.url, gathered["layout"], ranks)\n',
        "",
        GATHER + "test_a_shard_that_a_rank_of_the_mesh_lacks_is_refused_at_the_save",
    ),
    of(
        "tables: a rank that names a table has its optimizers",
        "checkpoint/reading/catalogue.py",
        "(part if owner == rank else self.part(owner))",
        "part",
        GATHER + "test_a_rank_has_the_optimizers_of_the_rank_whose_table_it_names",
    ),
    of(
        "tables: the last save's keys leave the job's store",
        "engine/saving/save.py",
        "        meeting.drop(self._claimed)",
        "        pass",
        RANKS + "test_replication_groups_commit_one_step_together_and_resume_it",
    ),
]

SILENT = [
    of(
        "overlap: the image is compared with the state of the call", "staging/overlap.py",
        "            if changed:\n", "            if False:\n",
        STAGING + "test_a_thousand_tears_at_any_moment_are_noticed_and_nothing_else_is",
        "test_a_tensor_that_is_put_back_before_the_copies_end_is_noticed",
        OVERLAP + "test_a_change_that_no_hook_sees_fails_the_save_by_name_and_later_ones_block",
    ),
    of(
        "overlap: a word's digest depends on its position", "staging/digest.py",
        "        z += (i + 1) * 0x9E3779B97F4A7C15ull;\n", "",
        DIGEST + "test_what_no_sum_of_words_sees_is_seen",
    ),
    of(
        "overlap: words are mixed before they are summed", "staging/digest.py",
        "        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;\n        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;\n", "",
        DIGEST + "test_what_no_sum_of_words_sees_is_seen",
    ),
    of(
        "overlap: bytes that fill no word count", "staging/digest.py",
        "i * 8 < size; i += threads", "i < size / 8; i += threads",
        DIGEST + "test_it_depends_on_the_bytes_alone_wherever_they_begin_and_however_many",
    ),
    of(
        "overlap: a device without a compiler blocks", "staging/overlap.py",
        "            except Exception as error:  # of the compiler, or of a torch without it\n", "            except KeyError as error:\n",
        STAGING + "test_a_device_without_a_compiler_copies_before_the_return_and_that_is_logged_once",
    ),
    of(
        "read: blocks that are read at once are compared", "checkpoint/reading/blocks.py",
        "        return value == combined(self._stored()[1][block : block + count], count * BLOCK)\n", "        return True\n",
        "tests/checkpoint/test_read.py::test_a_bad_block_among_several_that_are_read_at_once_is_named",
    ),
    of(
        "prewarm: a close waits for the call that pins", "engine/saving/queue.py",
        "        if idle := self._pinning.acquire(timeout=5):\n            self._pinning.release()\n", "        idle = True\n",
        "tests/engine/test_prewarm.py::test_a_close_waits_for_the_call_that_pins_the_memory",
    ),
    of(
        "overlap: an optimizer's step waits for the copies", "staging/overlap.py",
        "    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:\n        self.wait()\n",
        "    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:\n        pass\n",
        OVERLAP + "test_forward_and_backward_go_on_and_the_step_waits",
        "test_each_optimizer_waits_and_one_that_is_not_in_the_state_does_nothing_else",
        "test_optimizers_that_step_in_the_backward_wait_there",
        "test_a_compiled_step_waits",
        "test_the_step_of_a_grad_scaler_waits",
    ),
    of(
        "overlap: a load waits for the copies", "engine/runtime.py",
        "        self.overlap.wait()\n", "",
        OVERLAP + "test_a_load_into_the_state_and_a_save_in_another_queue_do_not_tear_it",
    ),
    of(
        "overlap: a hook is removed only while it is alone", "staging/overlap.py",
        "hooks is not None and len(hooks) == 1", "hooks is not None",
        STAGING + "test_the_hook_of_somebody_else_is_left_alone_and_so_is_a_step_that_runs_it",
    ),
    of(
        "overlap: what a forward changes is copied before the return", "staging/copies.py",
        "copy[0] in stepped and overlap.takes(copy[2])", "overlap.takes(copy[2])",
        STAGING + "test_what_is_not_to_wait_and_what_is_strided_is_copied_before_the_return",
        OVERLAP + "test_forward_and_backward_go_on_and_the_step_waits",
    ),
    of(
        "overlap: strided tensors are copied before the return", "staging/overlap.py",
        "            and source.is_contiguous()\n", "",
        STAGING + "test_what_is_not_to_wait_and_what_is_strided_is_copied_before_the_return",
    ),
    of(
        "overlap: memory that is not pinned is copied before the return", "staging/copies.py",
        "if overlap is not None and arena.pinned is False:", "if False:",
        STAGING + "test_memory_that_is_not_pinned_is_copied_before_the_return_and_that_is_told_once",
    ),
    of(
        "overlap: after a tear saves block", "engine/saving/save.py",
        "        why = self._overlap.refusal\n", "        why = None\n",
        OVERLAP + "test_a_change_that_no_hook_sees_fails_the_save_by_name_and_later_ones_block",
    ),
    of(
        "overlap: an optimizer with two modes blocks", "engine/saving/save.py",
        "        if selection.swapped_by:\n", "        if False:\n",
        OVERLAP + "test_an_optimizer_that_swaps_parameters_outside_its_step_blocks",
    ),
    of(
        "overlap: the next save waits for copies into the arena", "engine/saving/save.py",
        "            self._wait_for_copies(job)  # of an earlier save, which failed before they ended\n", "",
        OVERLAP + "test_the_next_save_waits_for_the_copies_of_one_that_failed_before_they_ended",
    ),
    of(
        "alarm: parameters are compared with the last save", "engine/saving/alarms.py",
        "same, since = sums == last.sums, last.called", "same, since = False, last.called",
        ALARMS + "test_an_optimizer_that_does_not_step_is_told_by_name",
        "test_a_cached_model_beside_an_optimizer_that_steps_is_told",
    ),
    of(
        "alarm: only with a later step", "engine/saving/alarms.py",
        "last.watched == watched and _is_later(now, last):", "last.watched == watched:",
        ALARMS + "test_a_run_that_begins_again_at_an_earlier_step_is_not_told",
    ),
    of(
        "alarm: one parameter that changed is enough", "engine/saving/alarms.py",
        "    if not compared or any(looked.unchanged == 0 for looked in compared.values()):\n", "    if not compared:\n",
        ALARMS + "test_one_changed_element_of_one_parameter_is_a_change",
    ),
    of(
        "alarm: no replica is called wrong where two disagree", "engine/saving/alarms.py",
        "            if 2 * votes > len(held):\n", "            if True:\n",
        ALARMS + "test_a_replica_that_has_drifted_is_told_with_rank_host_and_name",
    ),
    of(
        "alarm: of three the odd one", "engine/saving/alarms.py",
        "            if 2 * votes > len(held):\n", "            if False:\n",
        ALARMS + "test_of_three_replicas_the_odd_one_is_named",
    ),
    of(
        "alarm: what was written is what was held", "engine/saving/alarms.py",
        "            if _at(brought[writer].wrote, at - low) != held[writer]:\n", "            if False:\n",
        ALARMS + "test_a_replica_that_has_drifted_is_told_with_rank_host_and_name",
    ),
    of(
        "alarm: NaN and infinity are counted", "engine/saving/alarms.py",
        "                nonfinite[slot.name] += count\n", "                pass\n",
        ALARMS + "test_nan_and_infinity_are_counted_by_name",
    ),
    of(
        "alarm: an error fails the save of all groups", "engine/saving/alarms.py",
        '        if getattr(alarms, kind) == "error":\n', "        if False:\n",
        ALARMS + "test_it_is_an_error_or_silent_on_request",
        "test_each_group_of_a_step_is_told_and_an_error_fails_them_all",
    ),
    of(
        "alarm: a failed save is not compared with", "engine/saving/save.py",
        "        looked, job.last = observer.looked(staged.held, slots, done, now, self._last)\n",
        "        looked, job.last = observer.looked(staged.held, slots, done, now, self._last)\n"
        "        self._last = job.last\n",
        ALARMS + "test_a_failed_save_is_not_what_the_next_is_compared_with",
    ),
]  # fmt: skip

HANGING = [
    of(
        "hang: a worker that does not answer is given up", "engine/background/commands.py",
        "        limit = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000\n",
        "        limit = None\n",
        WORKER + "test_a_worker_that_does_not_answer_is_given_up_in_time_and_killed",
    ),
    of(
        "hang: a worker that was given up is killed", "engine/background/worker_client.py",
        "            process.popen.kill()\n            with contextlib.suppress(",
        "            with contextlib.suppress(",
        WORKER + "test_a_worker_that_does_not_answer_is_given_up_in_time_and_killed",
    ),
    of(
        "hang: the rank whose worker hangs is named to all", "errors.py",
        'int(os.environ.get("RANK", "0")) if rank is None else rank', "0 if rank is None else rank",
        RANKS + "test_a_worker_that_hangs_fails_the_save_on_both_ranks_within_the_limit",
    ),
]  # fmt: skip

DISKS = [
    of(
        "disk: what a failed write began is removed", "engine/background/worker_write.py",
        "    except BaseException:\n        writer.abort()\n        raise\n", "    except BaseException:\n        raise\n",
        WORKER + "test_a_write_that_fails_halfway_leaves_nothing",
    ),
    of(
        "disk: space is reserved before anything is written", "storage/disk/posix_write.py",
        '            raise storage_error(error, self._path, f"reserve {size:,} bytes") from error\n', "            pass\n",
        DISK + "test_whatever_call_fails_all_ranks_hear_it_and_the_next_save_works",
    ),
    of(
        "disk: a write that fails is an error", "engine/background/worker_write.py",
        "    file.write_at(start, data)\n",
        "    try:\n        file.write_at(start, data)\n    except Exception:\n        pass\n",
        DISK + "test_whatever_call_fails_all_ranks_hear_it_and_the_next_save_works",
    ),
    of(
        "disk: a file is durable before its rank says so", "storage/disk/posix_write.py",
        "            os.fsync(self._fds[0])\n", "",
        "tests/storage/test_posix.py::test_a_file_is_durable_before_its_directory_says_so",
    ),
    of(
        "disk: one rank's error is all ranks'", "meeting/round.py",
        "                if message.error is not None:  # do not wait for the others\n                    failed = message\n                    raise message.error\n",
        "                if message.error is not None:\n                    continue\n",
        DISK + "test_whatever_call_fails_all_ranks_hear_it_and_the_next_save_works",
    ),
    of(
        "disk: a deletion that the disk refuses ends no run", "checkpoint/commits/run_directory.py",
        '            log.warning("%s stays for now: %s", found, error)\n            self._finished = False\n            return False\n', "            raise SystemExit from error\n",
        "tests/manager/test_faulty_disk.py",
    ),
    of(
        "disk: what a creation could not remove goes with its step", "checkpoint/commits/remove.py",
        "            if tmp is not None and (tmp.session", "            if False and (tmp.session",
        MANAGER_DISK + "test_a_disk_that_fails_loses_no_step_and_what_was_not_deleted_goes_later",
    ),
    of(
        "disk: so does what is left of its mark", "checkpoint/commits/remove.py",
        '        if name.startswith(f".{mark}."):\n', "        if False:\n",
        MANAGER_DISK + "test_a_disk_that_fails_loses_no_step_and_what_was_not_deleted_goes_later",
    ),
]  # fmt: skip

LATE = [
    of(
        "messages: a field that is not known is refused", "decoding.py",
        "    if not newer:\n        _refuse_unknown(made, data)\n", "",
        "tests/meeting/test_keys.py::test_a_value_of_another_type_is_refused_with_the_field",
        "tests/meeting/test_meeting.py::test_a_message_of_another_version_is_an_error_on_all",
    ),
    of(
        "records: a number has at most 64 bits", "decoding.py",
        "Meta(ge=0, le=(1 << 63) - 1)", "Meta(ge=0)",
        "tests/checkpoint/test_format.py::test_a_wrong_field_of_a_manifest_is_refused",
    ),
    of(
        "records: a step has at most 64 bits, at the call too", "engine/saving/job.py",
        "        if step is not None and step.bit_length() > 63:\n", "        if False:\n",
        "tests/engine/test_bad_input.py::test_a_bad_save_is_told_on_every_rank_and_loses_nothing",
    ),
    of(
        "late: an absent rank is named", "meeting/store.py",
        "                raise _absent(sorted(away), self._name, held.point)\n",
        '                raise PeerError("a rank is late")\n',
        ABSENT + "test_a_late_rank_is_named_in_time_and_hears_of_it",
        RANKS + "test_a_peer_that_never_comes_is_named_within_the_limit",
    ),
    of(
        "late: absent ranks are named before the ranks have met", "meeting/store.py",
        "            error = _absent(list(away), name, \"agreeing on a session\")\n",
        '            error = PeerError("a rank is late")\n',
        ABSENT + "test_a_late_rank_is_named_in_time_and_hears_of_it",
    ),
    of(
        "late: a rank that comes later hears that the save was given up", "engine/saving/commit.py",
        "                if meeting.member == leader:\n                    meeting.refuse(point, over, leader=leader)\n",
        "                pass\n",
        RANKS + "test_a_rank_that_comes_after_a_save_was_given_up_hears_so_and_keeps_step",
    ),
]  # fmt: skip

TWO_JOBS = [
    of(
        "jobs: the older job saves no more", "manager/retention.py",
        "        if self._over is not None:\n            raise self._over\n", "",
        JOBS + "test_a_process_that_outlived_its_restart_saves_and_deletes_no_more",
    ),
    of(
        "jobs: only the older one", "manager/retention.py",
        "        if claim > self._claim:\n", "        if True:\n",
        JOBS + "test_of_two_jobs_one_goes_on_and_the_other_is_told",
    ),
    of(
        "jobs: a claim is above those before it", "manager/retention.py",
        "self._claim = Claim(generation,", "self._claim = Claim(1,",
        JOBS + "test_a_process_that_outlived_its_restart_saves_and_deletes_no_more",
    ),
    of(
        "jobs: those that save to the same directories are seen", "manager/retention.py",
        "for other in [*again, subpath, *(", "for other in [*(",
        JOBS + "test_a_later_job_that_saves_to_the_same_directories_only_is_seen",
    ),
    of(
        "jobs: the older job deletes no more", "manager/retention.py",
        "                if looks and all(looks):",
        "                if looks:",
        JOBS + "test_a_process_that_outlived_its_restart_saves_and_deletes_no_more",
    ),
    of(
        "jobs: a step of another run is not replaced", "manager/retention.py",
        "        if owner not in (None, run):\n", "        if False:\n",
        JOBS + "test_a_step_of_another_run_is_not_replaced",
    ),
    of(
        "jobs: of two sessions in one directory the earlier is fenced", "checkpoint/commits/commit.py",
        "        if error is not None:\n            _take_back(storage, fencing_token, attempt, error)\n", "",
        "tests/engine/test_bad_places.py::test_a_zombie_of_an_earlier_run_cannot_commit_over_a_later_one",
    ),
    of(
        "jobs: a probe that another job swept away names that job", "checkpoint/commits/leases.py",
        "            if session in lease.before:  # the file was here",
        "            if False:  # the file was here",
        "tests/checkpoint/test_sweep.py::test_a_job_whose_probe_another_job_swept_away_hears_of_that_job",
    ),
]  # fmt: skip

WRONG_CLOCKS = [
    of(
        "clock: the newest commit stays", "checkpoint/commits/run_directory.py",
        "stay = {last.path}.union(", "stay = set[str]().union(",
        RETENTION + "test_what_was_saved_last_stays_though_step_and_clock_say_it_is_old",
    ),
    of(
        "clock: the newest by step stays", "manager/retention.py",
        "for order in (by_step, by_time)", "for order in (by_time,)",
        CLOCKS + "test_each_run_goes_on_from_the_newest_step_whatever_clocks_say",
    ),
    of(
        "clock: steps are ordered by their numbers", "checkpoint/commits/run_directory.py",
        "if step is not None), reverse=True",
        "if step is not None), key=lambda one: -found_at(self.root.join(one[1])).committed_at",
        CLOCKS + "test_each_run_goes_on_from_the_newest_step_whatever_clocks_say",
    ),
    of(
        "clock: commits of a directory are ordered by fencing tokens", "checkpoint/commits/leases.py",
        "        fencing_token = max(fencing_token, *tokens, 0) + 1\n",
        "        fencing_token = time.time_ns() // 10**9\n",
        CLOCKS + "test_of_saves_to_one_directory_the_last_counts_and_not_the_latest_clock",
    ),
    of(
        "clock: hosts may differ by a minute", "checkpoint/commits/remove.py",
        "until + _SKEW > time.time_ns()", "until > time.time_ns()",
        RETENTION + "test_the_pin_of_a_host_whose_clock_is_behind_by_less_than_a_minute_holds",
    ),
    of(
        "clock: a lease from the future is skipped", "checkpoint/commits/leases.py",
        "        if lease.taken_at > time.time_ns() + _SKEW:\n", "        if False:\n",
        "tests/checkpoint/test_leases.py", "tests/checkpoint/test_commit.py", "tests/engine/test_elastic.py",
    ),
]  # fmt: skip

SMALL = [
    of(
        "small: a worker that is refused memory says so", "engine/background/worker.py",
        "            if _lacks_resources(error):\n", "            if False:\n",
        RESOURCES + "test_with_too_little_memory_a_save_fails_by_name",
    ),
    of(
        "small: a worker that cannot start is named", "engine/background/worker_client.py",
        "        except OSError as error:\n            raise WorkerError(\n                f\"the worker could not be started",
        "        except ZeroDivisionError as error:\n            raise WorkerError(\n                f\"the worker could not be started",
        WORKER + "test_a_worker_that_cannot_start_is_named_with_the_limits",
    ),
    of(
        "small: a killed worker is named with the cause", "engine/background/worker_client.py",
        'remedy="if it was killed, check whether the host or its cgroup ran out of memory "', 'remedy="if it was killed, try again "',
        RESOURCES + "test_a_worker_that_its_control_group_kills_is_named_with_the_cause",
    ),
]  # fmt: skip

FORKED = [
    of(
        "fork: a child does not wait for its parent's save", "engine/saving/job.py",
        "        if os.getpid() != self._pid and not self.done():\n", "        if False:\n",
        FORKS + "test_a_child_that_forks_off_in_mid_save_ends_clean_and_the_save_is_committed_once",
    ),
    of(
        "fork: a child does not wait for saves at its exit", "engine/runtime.py",
        "        if os.getpid() != self._pid:\n            return\n        _end_with(", "        _end_with(",
        FORKS + "test_a_child_that_forks_off_in_mid_save_ends_clean_and_the_save_is_committed_once",
    ),
    of(
        "fork: a child has no queues", "engine/runtime.py",
        "            self._queues, self._adopted, self._loaders, self._watching = {}, {}, {}, False\n", "            pass\n",
        FORKS + "test_a_child_that_is_a_job_of_its_own_saves_elsewhere",
        "test_a_child_that_forks_off_in_mid_save_ends_clean_and_the_save_is_committed_once",
    ),
    of(
        "fork: a child does not speak for its parent's rank", "engine/runtime.py",
        "        if group.store is not None and group.store is self._inherited:\n", "        if False:\n",
        FORKS + "test_a_child_does_not_speak_for_the_rank_that_forked_it",
    ),
    of(
        "fork: a signal to a child is its own", "manager/notice.py",
        "            after_in_child=while_alive(self.forget),\n", "",
        FORKS + "test_a_signal_to_a_child_is_no_notice_to_its_parent",
    ),
    of(
        "fork: a child does not end its parent's manager", "manager/manager.py",
        "        if os.getpid() != self._pid:  # a forked child that unwinds owns nothing here\n            return\n", "",
        FORKS + "test_a_child_that_leaves_the_managers_block_ends_nothing",
    ),
    of(
        "fork: a child does not save by its parent's manager", "manager/manager.py",
        "        if os.getpid() != self._pid:\n            raise UsageError(", "        if False:\n            raise UsageError(",
        FORKS + "test_a_child_that_leaves_the_managers_block_ends_nothing",
    ),
    of(
        "fork: a child does not use its parent's worker", "engine/background/worker_client.py",
        "        if os.getpid() != self._owner:\n            raise WorkerError(", "        if False:\n            raise WorkerError(",
        WORKER + "test_a_forked_child_cannot_use_the_worker_nor_hold_its_ends",
    ),
]  # fmt: skip

UPGRADED = [
    of(
        "upgrade: a worker of another version is refused", "engine/background/worker_client.py",
        '                if (version := hello.get("version")) != __version__:\n',
        "                if (version := None) is not None:\n",
        UPGRADE + "test_a_worker_of_another_version_is_refused_by_name_and_a_restart_goes_on",
    ),
    of(
        "upgrade: a worker loads all that it needs at its start", "engine/background/worker.py",
        "            for module in _SERVING:\n                importlib.import_module(module)\n", "",
        UPGRADE + "test_a_worker_that_has_not_written_yet_goes_on_too",
    ),
]  # fmt: skip
