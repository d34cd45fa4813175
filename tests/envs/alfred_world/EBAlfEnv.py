"""EB-ALFRED's call surface over a toy world for all its kinds of tasks: doors, water, heat, cold and knives.

In a copy of the stand-in it takes the place of the smaller world.
"""

from __future__ import annotations

import json
import os

import numpy as np

X_DISPLAY = "1"
HERE = os.path.dirname(__file__)
ValidEvalSets = ["base", "common_sense", "complex_instruction", "spatial", "visual_appearance", "long_horizon"]
OPENABLE = ["Box", "Cabinet", "Drawer", "Fridge", "Laptop", "Microwave", "Safe"]
DOORS = ["Cabinet", "Drawer", "Fridge", "Microwave", "Safe"]  # closed at first; a box has no lid
SLICEABLE = ["Apple", "Bread", "Lettuce", "Potato", "Tomato"]
SWITCHES = ["DeskLamp", "Faucet", "FloorLamp", "Microwave"]
PORTABLE = """AlarmClock BaseballBat BasketBall Book Bowl Box ButterKnife CD Candle CellPhone Cloth CreditCard Cup
DishSponge Egg Fork Glassbottle HandTowel Kettle KeyChain Knife Ladle Laptop Mug Newspaper Pan Pen Pencil PepperShaker
Pillow Plate Plunger Pot RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon SprayBottle Statue TennisRacket
TissueBox ToiletPaper Vase Watch WateringCan WineBottle""".split()
FIXED = """ArmChair Bathtub Bed Cabinet Cart CoffeeMachine CoffeeTable CounterTop Desk DiningTable Drawer Dresser Fridge
GarbageCan Microwave Ottoman Safe Shelf SideTable Sink Sofa StoveBurner Toilet ToiletPaperHanger""".split()
SKILLS = [
    *(f"find a {name}" for name in [*PORTABLE, *SLICEABLE, *FIXED, "DeskLamp", "Faucet", "FloorLamp"]),
    *(f"pick up the {name}" for name in [*PORTABLE, *SLICEABLE]),
    "put down the object in hand",
    "drop the object in hand",
    *(f"{verb} the {name}" for name in OPENABLE for verb in ("open", "close")),
    *(f"{verb} the {name}" for name in SWITCHES for verb in ("turn on", "turn off")),
    *(f"slice the {name}" for name in SLICEABLE),
]


class EBAlfEnv:
    def __init__(
        self,
        eval_set="base",
        exp_name="",
        down_sample_ratio=1.0,
        selected_indexes=(),
        detection_box=False,
        resolution=500,
    ):
        assert eval_set in ValidEvalSets
        with open(os.path.join(HERE, "data", "splits", "splits.json")) as file:
            self.dataset = json.load(file)[eval_set]
        self.display, self.resolution = X_DISPLAY, resolution
        self.number_of_episodes = len(self.dataset)
        self._reset, self._current_episode_num, self._current_step = False, 0, 0
        self._max_episode_steps, self._cur_invalid_actions, self._max_invalid_actions = 30, 0, 10
        self.episode_language_instruction = ""
        self.language_skill_set = list(SKILLS)
        self.id_to_name_dict = None

    def reset(self):
        assert self._current_episode_num < self.number_of_episodes
        entry = self.dataset[self._current_episode_num]
        path = os.path.join(HERE, "data", "json_2.1.0", entry["task"], "pp", f"ann_{entry['repeat_idx']}.json")
        with open(path) as file:
            annotation = json.load(file)
        print("Restoring scene ...")  # the real one also prints to stdout
        self.episode_language_instruction = entry["instruction"]
        self.kind, self.wanted, self.movable, self.target, _ = entry["task"].split("/")[0].split("-")
        self.target = self.target.replace("Basin", "")  # things are put in a Sink, whose basin has no skill
        self._name_instances(annotation)
        self.at = self.place = self.receptacle = self.held = ""
        self.where, self.states = {}, {}  # thing -> where it was put; thing -> what was done to it
        lows = [low["api_action"].get("objectId", "") for low in annotation.get("plan", {}).get("low_actions", [])]
        if self.movable != "None" and not any(f"{self.wanted}|" in thing for thing in lows):
            self.where[self.wanted] = self.movable  # in some tasks it lies in it from the start
        self._fill_places(annotation)
        self.open, self.on = set(), set()
        self._current_step = self._cur_invalid_actions = 0
        self._current_episode_num += 1
        self._reset = True
        return {"head_rgb": self._frame()}

    def _name_instances(self, annotation):
        """Number further instances of a kind, as the real one does for each scene; every scene has two shelves."""
        ids = {}
        for low in annotation.get("plan", {}).get("low_actions", []):
            for key in ("objectId", "receptacleObjectId"):
                if key in low["api_action"]:
                    name = "|".join(low["api_action"][key].split("|")[:4])
                    known = ids.setdefault(name.split("|")[0], [])
                    known += [] if name in known else [name]
        shelves = ids.setdefault("Shelf", [])
        shelves += ["Shelf|1", "Shelf|2"][len(shelves) :]
        self.names = names = {
            i: kind + (f"_{n + 1}" if n else "") for kind, known in ids.items() for n, i in enumerate(known)
        }
        more = [name for name in names.values() if "_" in name]
        self.id_to_name_dict = {i: name for i, name in names.items() if len(ids[i.split("|")[0]]) > 1}
        self.language_skill_set = [*SKILLS, *(f"find a {name}" for name in more)]
        for verb in ("open", "close"):
            self.language_skill_set += [f"{verb} the {name}" for name in more if name.split("_")[0] in OPENABLE]

    def _fill_places(self, annotation):
        """Put into closed places what the demonstration takes out of them."""
        known, opened = set(), ""
        for low in annotation.get("plan", {}).get("low_actions", []):
            action = low["api_action"]
            thing = self.names.get("|".join(action.get("objectId", "").split("|")[:4]), "")
            if action["action"] in ("OpenObject", "CloseObject"):
                opened = thing if action["action"] == "OpenObject" else ""
            elif action["action"] in ("PickupObject", "SliceObject") and thing not in known:
                known.add(thing)
                if opened:
                    self.where[thing] = opened

    def step(self, action, reasoning=""):
        assert self._reset, "Reset env before stepping"
        if type(action) is int:
            skill = self.language_skill_set[action]
        elif type(action) is str:
            skill = action
        else:
            raise NotImplementedError
        self._current_step += 1
        message = self._act(skill)
        if message:
            self._cur_invalid_actions += 1
        met = self._goal()
        success = float(all(met))
        over = self._current_step >= self._max_episode_steps or self._cur_invalid_actions >= self._max_invalid_actions
        info = {
            "task_success": success,
            "task_progress": sum(met) / len(met),
            "instruction": self.episode_language_instruction,
            "env_step": self._current_step,
            "env_feedback": f"Last action is invalid. {message}" if message else "Last action executed successfully.",
            "last_action_success": float(not message),
            "action_id": action,
            "action_description": skill,
        }
        return {"head_rgb": self._frame()}, success, bool(over or success), info

    def close(self):
        self.display = None

    def _act(self, skill):
        """Empty when it worked, else why it did not."""
        *verb, name = skill.split()
        verb = " ".join(verb).rsplit(" ", 1)[0]
        if verb not in ("find", "open", "put down the object"):
            self.receptacle = ""
        if verb == "find":
            self.at = self.receptacle = name
            self.place = self.where.get(name, name)
            return ""
        return {"pick up": self._pick, "put down the object": self._put, "drop the object": self._drop}.get(
            verb, lambda _: self._handle(verb, name)
        )(name)

    def _pick(self, name):
        if self.held or not self._near(name):
            return "Robot is already holding something or is not near the object."
        inside = self._inside(self.at)
        if inside:
            return f"{name} is not visible because it is in {inside}."
        self.held = self.at
        self.where.pop(self.held, None)
        return ""

    def _put(self, _):
        if not self.held:
            return "Robot is not holding any object."
        if self.receptacle.split("_")[0] in DOORS and self.receptacle not in self.open:
            return f"Putting the object on {self.receptacle} failed. First check whether the receptacle is open or not."
        self.where[self.held], self.held = self.receptacle or "Floor", ""
        return ""

    def _drop(self, _):
        self.receptacle = ""
        return self._put(_)

    def _handle(self, verb, name):
        if not self._near(name):
            return f"Cannot {verb} {name}."
        if verb in ("open", "close"):
            if (name in self.open) == (verb == "open"):
                return f"The {name} is already {verb}."
            self.open ^= {name}
            if name.startswith("Fridge"):
                self._change(name, "cool")
            return ""
        if verb == "slice":
            if "Knife" not in self.held or self._inside(self.at):
                return "Slice action failed"
            self.states.setdefault(self.at, set()).add("sliced")
            return ""
        if (name in self.on) == (verb == "turn on") or name in self.open:
            return f"{verb.capitalize()} action failed"
        self.on ^= {name}
        if verb == "turn on" and name in ("Faucet", "Microwave"):
            self._change("Sink" if name == "Faucet" else name, "clean" if name == "Faucet" else "heat")
        return ""

    def _near(self, name):
        """Whether the robot found the thing, or something that was in it."""
        return name in (self.at, self.at.split("_")[0], self.place)

    def _inside(self, thing):
        place = self.where.get(thing, "")
        return place if place.split("_")[0] in DOORS and place not in self.open else ""

    def _change(self, place, state):
        for thing, at in self.where.items():
            if at.split("_")[0] == place.split("_")[0]:
                self.states.setdefault(thing, set()).add(state)

    def _goal(self):
        """The conditions of the task's kind, and whether each is met: ALFRED's, in names of things."""
        wanted, sliced = self.wanted.replace("Sliced", ""), self.wanted.endswith("Sliced")
        needs = {"sliced"} if sliced else set()
        for state in ("clean", "heat", "cool"):
            needs |= {state} if f"pick_{state}_" in self.kind else set()
        things = [
            thing
            for thing in {*self.where, *self.states, self.held}
            if thing.split("_")[0] == wanted and needs <= self.states.get(thing, set())
        ]
        if self.kind.startswith("look_at"):
            return [self.held in things, self.held in things and self.target in self.on]
        if self.movable != "None":
            carried = [self.where.get(t, "") for t in things if self.where.get(t, "").split("_")[0] == self.movable]
            placed = [self.where.get(c, "").split("_")[0] == self.target for c in carried]
            return [bool(carried), any(placed)]
        placed = [t for t in things if self.where.get(t, "").split("_")[0] == self.target]
        pieces = sum(2 if sliced else 1 for _ in placed)
        need = 2 if self.kind.startswith("pick_two") else 1
        return [bool(things), pieces >= need]

    def _frame(self):
        frame = np.zeros((self.resolution, self.resolution, 3), dtype=np.uint8)
        frame[:, :, 0] = min(5 * self._current_step, 255)
        return frame
