"""Snapshots of tensors on a GPU."""

from __future__ import annotations

import pytest
import torch

from elastic_launch.snapshot.memory.slot import EVALUATED, Header, Slot
from elastic_launch.snapshot.memory.slot_state import SlotDraft, SlotWriter, read_state
from elastic_launch.snapshot.memory.staging import PIECE, Stagings, mark


def test_what_is_not_on_a_gpu_waits_for_none() -> None:
    assert mark([torch.ones(3)]) == []
    stagings = Stagings()
    stagings.prepare([torch.ones(3)])
    assert stagings.of(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_snapshot_has_what_was_on_the_gpu_when_it_was_taken() -> None:
    slot = Slot.make("test")
    writer = SlotWriter(slot, stagings := Stagings())
    large = torch.zeros(3 * PIECE // 4 + 5, device="cuda")
    for number in range(2):
        torch.cuda._sleep(100_000_000)  # what follows waits for it on the device
        large.fill_(7.0 + number)
        state = {
            "large": large,
            "gaps": torch.arange(12, device="cuda").reshape(3, 4).T,
            "changes": torch.tensor(float(number), device="cuda"),
            "none": torch.empty(0, device="cuda"),
            "here": torch.arange(5),
        }
        draft = SlotDraft(state, {}, lambda tensor: tensor.numel() > 1)
        stagings.prepare(draft.tensors.values())
        assert stagings.of(large.device) is not None
        state["changes"].fill_(99.0)
        writer.write(draft, Header(number + 1, 1, number + 1, EVALUATED, 0))
        header = slot.header()
        assert header is not None
        found = read_state(slot, header)
        assert torch.equal(found["large"], torch.full_like(found["large"], 7.0 + number))
        assert torch.equal(found["gaps"], torch.arange(12).reshape(3, 4).T)
        assert found["changes"].item() == number
        assert found["none"].numel() == 0
        assert torch.equal(found["here"], torch.arange(5))
    writer.close()
    slot.close()
