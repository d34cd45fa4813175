"""The one helper of EB-Manipulation's that an agent's observation needs."""

from __future__ import annotations


def form_object_coord_for_input(obs, task_class, camera_types):
    """Coordinates by object, then three lists that the pictures need. Like the real one, it spoils what it is given."""
    informations = obs.pop("object_informations")
    return {f"object {i + 1}": places for i, places in enumerate(informations.values())}, [], [], []
