"""What denoise steps, and drawing images together, are measured against."""

from __future__ import annotations

import pytest

from tests.scheduler.simulation import (
    Simulation,
    drawing,
    expected_images,
    expected_output,
    image_limits,
    limits,
    request,
)
from weft.scheduler.integrity import check_integrity


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_with_either_switched_off_the_same_images_are_drawn_beside_the_same_answer(
    whole: bool, single: bool, delay: int
) -> None:
    images = [drawing(f"i{i}", [i], 5 + i) for i in range(3)]
    chat = request("chat", [1], 12)
    of_images = image_limits(whole_images=whole, single_images=single, max_mixed_denoise=24)
    simulation = Simulation(limits(image=of_images, num_blocks=100, max_num_seqs=8), delay)
    simulation.add(chat, *images)
    simulation.run()
    assert simulation.outputs["chat"] == expected_output(chat, 64)
    for image in images:
        name, steps = image.request_id, image.image.steps
        assert simulation.shown[name] == expected_images(image)
        assert simulation.progress[name] == ([steps] if whole else list(range(1, steps + 1)))
    most_in_a_step = max(len(plan.denoise) for plan in simulation.plans)
    assert most_in_a_step == 1 if single else most_in_a_step > 1
    if single:
        assert [event.request_id for event in simulation.events if event.finish and event.image] == ["i0", "i1", "i2"]
    check_integrity(simulation.scheduler)


def test_one_whole_image_a_step_lets_answers_go_on_between_two() -> None:
    images = [drawing(f"i{i}", [i], 20) for i in range(3)]
    of_images = image_limits(whole_images=True, single_images=True)
    simulation = Simulation(limits(image=of_images, num_blocks=100, max_num_seqs=8))
    simulation.add(request("chat", [1], 10), *images)
    simulation.run()
    drawn_in = [plan for plan in simulation.plans if plan.denoise]
    assert len(drawn_in) == 3 and all(plan.denoise[0].count == 20 for plan in drawn_in)
    assert all(len(plan.rows) >= 1 for plan in drawn_in), "each step decodes, too"
