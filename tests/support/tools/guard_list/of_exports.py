"""Guards of exports and of adapters that are merged."""

# ruff: noqa: E501 - the texts are lines of the code
from __future__ import annotations

from tests.support.tools.guard_list.guard import of

BAD = "tests/translate/exports/test_bad_input.py::"
CONFIG = "tests/translate/test_config.py::"
EXPORT = "tests/translate/exports/test_export.py::"
HUB = "tests/formats/test_hub_sources.py::"
LAYOUTS = "tests/translate/layouts/test_layout_checkpoints.py::"
LORA = "tests/translate/models/test_lora.py::"
NAMES = "tests/translate/exports/test_names.py::"
PUBLISH = "tests/translate/publishing/test_publish.py::"
RELEASED = "tests/translate/models/test_released.py::"
SOURCES = "tests/formats/test_sources.py::"
VERIFY = "tests/translate/exports/test_verify_hf.py::"

EXPORTED = [
    of(
        "export: the source is never the target", "translate/exports/export.py",
        '            given["checkpoint"] = checkpoint\n', "            pass\n",
        BAD + "test_nothing_is_written_where_the_source_is",
    ),
    of(
        "export: what git-lfs has not fetched is named", "formats/readers/torch_files.py",
        "if first == _POINTER:", "if False:",
        BAD + "test_what_git_lfs_has_not_fetched_is_named",
    ),
    of(
        "export: a tokenizer's files leave with a failed export", "translate/exports/sidecars.py",
        "        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:",
        "        for made in [output.url]:",
        EXPORT + "test_a_tokenizers_files_are_all_written_and_all_removed_if_the_export_fails",
    ),
    of(
        "export: nothing stays of an older tokenizer", "translate/exports/sidecars.py",
        "        output.storage.delete_many([*filter(is_of_tokenizer, output.storage.names())])",
        "        pass",
        EXPORT + "test_an_overwritten_directory_keeps_nothing_of_an_older_tokenizer",
    ),
    of(
        "export: a merged model replaces an adapter", "translate/files.py",
        "(adapter_config|", "(",
        LORA + "test_a_merged_model_replaces_an_adapter",
    ),
    of(
        "export: nothing tells of an older model's weights", "translate/files.py",
        "hf_quant_config|quantize_config|params", "hf_quant_config|quantize_config",
        EXPORT + "test_a_directory_that_holds_something_is_refused_unless_it_may_be_overwritten",
    ),
    of(
        "export: into a store it waits for the names", "translate/exports/export.py",
        "guess=guess and is_local(os.fspath(out_dir)),", "guess=guess,",
        NAMES + "test_an_export_waits_for_the_names_where_it_could_not_begin_again",
    ),
    of(
        "export: several processes wait for the names", "translate/exports/export.py",
        "guess = group.count == 1 and not", "guess = not",
        NAMES + "test_an_export_waits_for_the_names_where_it_could_not_begin_again",
    ),
    of(
        "export: parts of ranks by the model's own names", "translate/models/model_source.py",
        "not cut and not has_parts_of_ranks(catalogue, tensors)", "not cut",
        LAYOUTS + "test_parts_under_hugging_faces_names_do_not_pass_for_the_model",
    ),
    of(
        "export: a file without a model", "formats/readers/torch_files.py",
        "    if not state.logical:\n", "    if False:\n",
        SOURCES + "test_a_file_without_a_model_is_refused_with_the_keys_that_it_has",
    ),
    of(
        "export: rotary parameters for each type of layer", "translate/config.py",
        "    if _LOCAL in values or kind in _BY_LAYER:", "    if False:",
        CONFIG + "test_one_set_of_rotary_parameters_of_transformers_4_becomes_one_for_each_type_of_layer",
    ),
    of(
        "export: heads that are tied by default", "translate/config.py",
        "        return None if default is None else bool(default)", "        return None",
        EXPORT + "test_a_head_is_tied_by_default_where_the_families_config_does_not_say_it",
    ),
    of(
        "verify: a head that the config ties and that differs", "translate/exports/verify_hf.py",
        "            problems.append(error.message)\n", "            pass\n",
        VERIFY + "test_a_head_that_the_config_ties_and_that_differs_is_a_problem",
    ),
    of(
        "export: names of several wrappers", "formats/names.py",
        "        outer += 1\n", "        outer += 1\n        break\n",
        SOURCES + "test_wrappers_and_a_trainers_module_are_left_out_in_any_order",
    ),
    of(
        "export: DeepSpeed's latest step is missing", "formats/readers/rank_sources.py",
        "if t in folder.folders and t.startswith(tag)", "if t in folder.folders",
        SOURCES + "test_a_step_that_deepspeed_names_and_that_is_missing_is_told",
    ),
    of(
        "export: nothing stays of older settings of generation", "translate/exports/sidecars.py",
        "            output.storage.delete(GENERATION_CONFIG)", "            pass",
        EXPORT + "test_an_overwritten_directory_keeps_no_older_settings_of_generation",
    ),
    of(
        "export: a copy of another rank's file", "translate/ranks/copied.py",
        "                if (first.stage, first.parts) != (other.stage, other.parts):\n", "                if False:\n",
        SOURCES + "test_a_copy_of_another_ranks_file_is_refused",
    ),
    of(
        "export: a store where a disk is read", "formats/degrees.py",
        "if isinstance(value, str) and value:", "if False:",
        BAD + "test_a_store_is_refused_by_name_where_a_disk_is_read",
    ),
    of(
        "import: the weights that the config names", "formats/readers/rank_files.py",
        "named = _of_config(folder)", "named = None",
        HUB + "test_the_weights_that_the_config_names_are_read",
    ),
    of(
        "import: one file comes before an old index", "formats/readers/rank_files.py",
        "_NAMES = (SINGLE, INDEX, ", "_NAMES = (INDEX, SINGLE, ",
        RELEASED + "test_one_file_beside_the_index_of_an_older_model_is_what_transformers_reads",
    ),
    of(
        "lora: an adapter that began with parts of its base", "translate/models/adapter.py",
        "                config.refuse_other_base()\n", "",
        LORA + "test_an_adapter_that_began_with_parts_of_the_base_is_not_added_to_the_release",
    ),
    of(
        "lora: an embedding apart from its tied head", "translate/models/tied.py",
        "        if name in made or trained", "        if True or trained",
        LORA + "test_an_embedding_trained_apart_from_its_tied_head_is_not_written_for_both",
    ),
    of(
        "lora: tokens that are trained alone", "translate/models/lora.py",
        '            parts.adapter[f"{PREFIX}{tokens[\'module\']}.trainable_tokens_delta"] = tensor',
        "            pass",
        LORA + "test_tokens_that_are_trained_alone_go_with_the_adapter",
    ),
    of(
        "lora: Conv1D beside linear layers", "translate/models/lora.py",
        "return named and self.model_type in _CONV1D_FAMILIES", 'return self.values.get("fan_in_fan_out")',
        LORA + "test_conv1d_and_linear_layers_of_one_adapter_are_told_apart",
    ),
    of(
        "publish: half of an export", "translate/publishing/publish.py",
        "if SINGLE not in infos:", "if False:",
        PUBLISH + "test_half_of_an_export_in_several_files_is_refused",
    ),
    of(
        "publish: the record of an applied directory", "translate/publishing/publish.py",
        " if info.name not in own}", "}",
        PUBLISH + "test_a_model_that_began_as_a_copy_of_an_applied_one_is_published_without_its_record",
    ),
]  # fmt: skip
