from dataclasses import replace

from examples.demo.report import Measurement, Prices, table

ONE = Measurement(
    title="one",
    num_turns=3,
    num_calls=4,
    num_hits=3,
    num_hit_turns=2,
    num_wasted=1,
    stock_s=5.4,
    speculative_s=4.3,
    generation_s=0.9,
    speculator_s=0.2,
    tool_s=0.6,
    num_prompt_tokens=2_000,
    num_completion_tokens=100,
)


def test_the_prediction_is_equation_1_and_a_final_turn():
    assert round(ONE.predicted_stock_s, 9) == round(3 * (0.9 + 0.6) + 0.9, 9)
    assert round(ONE.predicted_s, 9) == round(2 * 0.9 + 1 * (0.9 + 0.6) + 0.9, 9)


def test_the_table_shows_every_number():
    text = table([ONE, replace(ONE, title="two", num_hits=0, num_hit_turns=0, num_wasted=4)], Prices(0.05, 0.4))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["one"] == ["3", "3/4", "0.75", "1", "5.40", "4.30", "20.4", "%", "22.2", "%", "2100", "0.00014"]
    assert rows["two"][1:4] == ["0/4", "0.00", "4"]
    assert rows["two"][-4:-2] == ["0.0", "%"]
    assert rows["all"] == ["6", "3/8", "0.38", "5", "10.80", "8.60", "20.4", "%", "11.1", "%", "4200", "0.00028"]


def test_a_run_without_calls_has_no_acceptance_rate():
    idle = replace(ONE, num_turns=0, num_calls=0, num_hits=0, num_hit_turns=0)
    assert table([idle], Prices(0, 0)).splitlines()[3].split()[3] == "-"


def test_short_titles_keep_to_80_columns():
    assert max(map(len, table([replace(ONE, title="x" * 15)], Prices(0.05, 0.4)).splitlines())) <= 80
