"""What people report about pictures in other servers, 2025 and 2026, and the tests that answer it.

Each report has the name of a test that fails if the same happens here.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
API, BAD = "api/test_api_pictures.py", "api/test_api_pictures_bad.py"
ENGINE, NAMES = "engine/test_engine_pictures.py", "core/test_placeholders.py"
REPORTS = {
    "a picture is encoded again in every turn of a conversation": (
        "api/test_api_pictures_served.py",
        "test_a_picture_is_encoded_once_and_found_in_the_prefix_cache",
    ),
    "a screenshot of an earlier turn is encoded again for an agent": (
        "clients/test_picture_clients.py",
        "test_an_agent_looks_at_screenshots_turn_after_turn",
    ),
    "the streams of others stop while a picture is encoded": (
        ENGINE,
        "test_streams_go_on_while_a_picture_is_encoded",
    ),
    "pictures are read one at a time, and texts wait behind them": (
        ENGINE,
        "test_prompts_and_the_tower_take_turns",
    ),
    "the prefix cache answers about another picture": (
        NAMES,
        "test_the_cache_does_not_take_another_picture_for_this_one",
    ),
    "8 bytes of a hash name a picture, and two pictures collide": (
        ENGINE,
        "test_digests_that_differ_in_the_last_byte_only_are_of_two_pictures",
    ),
    "a block on disk is used for another picture": (
        NAMES,
        "test_files_of_blocks_do_not_take_another_picture_for_this_one",
    ),
    "the server fetches any URL, so a caller reads its network": (
        API,
        "test_sources_that_are_not_allowed_are_refused",
    ),
    "a name has another address when it is fetched than when it was checked": (
        BAD,
        "test_a_name_with_a_private_address_at_the_second_look",
    ),
    "a picture of a few bytes takes all memory or time": (
        BAD,
        "test_a_malformed_picture_is_refused_alone",
    ),
    "a broken decoder ends the server": (
        BAD,
        "test_the_process_that_decodes_is_killed_and_the_next_picture_is_read",
    ),
    "the text <image> of a user counts as a picture": (
        API,
        "test_markers_that_a_user_writes_are_plain_text",
    ),
    "pictures and markers are paired by a guess": (
        API,
        "test_a_template_with_another_number_of_markers_is_an_error",
    ),
    "a picture in the result of a tool is dropped": (
        API,
        "test_a_picture_in_a_tools_result_is_read",
    ),
    "the size and the filter are defaults of a class, not of the model": (
        "media/test_idefics3.py",
        "test_the_numbers_are_those_of_the_checkpoint",
    ),
    "a setting of the preprocessing is ignored": (
        "media/test_qwen_vl.py",
        "test_a_setting_that_the_family_cannot_follow_is_refused",
    ),
    "small text is scaled away, and nobody says so": (
        API,
        "test_the_sizes_and_tokens_of_pictures_are_told",
    ),
    "the mmproj file of another model is loaded": (
        "loader/test_mmproj.py",
        "test_an_mmproj_file_that_does_not_fit_is_named",
    ),
    "counting tokens decodes the pictures": (
        API,
        "test_tokens_are_counted_without_decoding",
    ),
    "a long prompt is cut in the middle of a picture": (
        API,
        "test_truncation_never_goes_through_a_picture",
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_each_report_has_a_test(report):
    file, name = REPORTS[report]
    names = {
        node.name: [ast.unparse(mark) for mark in node.decorator_list]
        for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert name in names, f"{file} has no {name}: name the test that answers this report"
    assert not any("skip" in mark or "xfail" in mark for mark in names[name])
