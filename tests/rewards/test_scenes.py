import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from core.types import Request, Sample
from rewards.scenes import (
    COLOURS,
    EXTENT,
    MASKS,
    OPPOSITE,
    SHAPES,
    TAGS,
    Clause,
    Scene,
    SceneReward,
    all_prompts,
    detect,
    parse,
    render,
    split,
    verify,
)

SCENES = [scene for scenes in all_prompts().values() for scene in scenes]


def near_miss(scene: Scene, rng: np.random.Generator) -> Scene:
    """A scene one thing away from `scene`: a shape, a colour, the count, the relation, or the two colours swapped."""
    clauses = list(scene.clauses)
    i = int(rng.integers(len(clauses)))
    clause = clauses[i]
    options = ["shape"]
    if clause.colour is not None:
        options.append("colour")
    if scene.tag == "counting":
        options += ["count", "count"]
    if len(clauses) == 2 and clauses[0].colour != clauses[1].colour:
        options.append("swap")
    if scene.relation is not None:
        options += ["relation", "relation"]
    match options[rng.integers(len(options))]:
        case "shape":
            clauses[i] = Clause(_other(SHAPES, clause.shape, rng), clause.colour, clause.count)
        case "colour":
            clauses[i] = Clause(clause.shape, _other(tuple(COLOURS), clause.colour, rng), clause.count)
        case "count":
            clauses[i] = Clause(clause.shape, clause.colour, clause.count + int(rng.choice((-1, 1))))
        case "swap":
            a, b = clauses
            clauses = [Clause(a.shape, b.colour, a.count), Clause(b.shape, a.colour, b.count)]
        case "relation":
            return Scene(scene.tag, scene.clauses, OPPOSITE[scene.relation])
    return Scene(scene.tag, tuple(clauses), scene.relation)


def _other(values: Sequence[str], value: str, rng: np.random.Generator) -> str:
    rest = [v for v in values if v != value]
    return rest[rng.integers(len(rest))]


@pytest.fixture(scope="module")
def rendered() -> list[tuple[Scene, np.ndarray]]:
    """Eighty pictures of every tag."""
    rng = np.random.default_rng(0)
    chosen = [scenes[i] for scenes in all_prompts().values() for i in rng.integers(len(scenes), size=80)]
    return [(scene, render(scene, rng)) for scene in chosen]


def samples_of(images: list[np.ndarray]) -> list[Sample]:
    return [Sample({"image": torch.from_numpy(image)}) for image in images]


def requests_of(scenes: list[Scene]) -> list[Request]:
    return [Request({"prompt": scene.prompt}) for scene in scenes]


def test_grammar_has_six_tags_and_unique_prompts():
    assert tuple(all_prompts()) == TAGS
    assert len({scene.prompt for scene in SCENES}) == len(SCENES) == 1280


def test_prompt_and_meta_round_trip():
    for scene in SCENES:
        assert parse(scene.prompt) == scene
        assert Scene.from_meta(json.loads(json.dumps(scene.meta))) == scene


def test_unknown_prompt_is_named():
    with pytest.raises(ValueError, match="a purple circle"):
        parse("a purple circle")


def test_split_is_disjoint_covering_and_fixed():
    train, heldout = split(0)
    for tag, scenes in all_prompts().items():
        assert set(train[tag]).isdisjoint(heldout[tag])
        assert set(train[tag]) | set(heldout[tag]) == set(scenes)
        assert len(heldout[tag]) == max(1, len(scenes) // 8)
    assert split(0) == (train, heldout)
    assert split(1) != (train, heldout)


def test_rendered_scenes_are_correct(rendered):
    assert all(verify(image, scene)["correct"] for scene, image in rendered)


def test_every_shape_and_colour_is_read_back():
    rng = np.random.default_rng(1)
    for shape in MASKS:
        for colour in COLOURS:
            (seen,) = detect(render(Scene("colors", (Clause(shape, colour),)), rng))
            assert (seen.shape, seen.colour) == (shape, colour)


def test_pixel_noise_does_not_matter(rendered):
    rng = np.random.default_rng(2)
    noisy = [np.clip(image + rng.normal(0, 25, image.shape), 0, 255).astype(np.uint8) for _, image in rendered]
    right = [verify(image, scene)["correct"] for (scene, _), image in zip(rendered, noisy, strict=True)]
    assert np.mean(right) > 0.97


def test_other_prompts_are_wrong(rendered):
    order = np.random.default_rng(3).permutation(len(rendered))
    right = [
        verify(image, rendered[j][0])["correct"]
        for (scene, image), j in zip(rendered, order, strict=True)
        if rendered[j][0].tag != scene.tag or rendered[j][0] != scene
    ]
    assert np.mean(right) < 0.05


def test_near_misses_are_nearly_always_wrong(rendered):
    rng = np.random.default_rng(4)
    assert np.mean([verify(render(near_miss(scene, rng), rng), scene)["correct"] for scene, _ in rendered]) < 0.05


def test_an_extra_object_is_wrong_but_found():
    rng = np.random.default_rng(5)
    scene = parse("a red circle and a green cross")
    for _ in range(20):
        image = render(scene, rng)
        background = image[0, 0] if (image[0, 0] == image[-1, 0]).all() else image[0, -1]
        free = [
            (8 * y, 8 * x)
            for y in range(4)
            for x in range(4)
            if (image[8 * y : 8 * y + 8, 8 * x : 8 * x + 8] == background).all()
        ]
        y, x = free[rng.integers(len(free))]
        image[y : y + EXTENT, x : x + EXTENT][MASKS["square"]] = COLOURS["blue"]
        verdict = verify(image, scene)
        assert not verdict["correct"]
        assert not verdict["count"]
        assert verdict["found"] == 1


def test_verdict_says_what_failed():
    rng = np.random.default_rng(6)
    image = render(parse("a red circle left of a green cross"), rng)
    reversed_ = verify(image, parse("a red circle right of a green cross"))
    assert (reversed_["found"], reversed_["relation"], reversed_["correct"]) == (1, False, False)
    recoloured = verify(image, parse("a red circle and a blue cross"))
    assert (recoloured["found"], recoloured["colours"], recoloured["count"]) == (0.5, False, True)
    assert not verify(image, parse("a red circle"))["count"]


def test_a_shapeless_blob_counts_as_an_object():
    image = render(parse("a red circle"), np.random.default_rng(7))
    corner = (slice(0, 3), slice(0, 5)) if detect(image)[0].y > 12 else (slice(29, 32), slice(0, 5))
    image[corner] = COLOURS["blue"]
    assert {seen.shape for seen in detect(image)} == {"circle", None}
    assert not verify(image, parse("a red circle"))["correct"]


def test_touching_objects_of_one_colour_are_not_drawn():
    rng = np.random.default_rng(8)
    scene = parse("four red squares")
    assert all(len(detect(render(scene, rng))) == 4 for _ in range(200))


def test_reward_shapes_partial_success(rendered):
    scene = parse("a red circle left of a green cross")
    rng = np.random.default_rng(9)
    images = [render(scene, rng), render(parse("a red circle right of a green cross"), rng)]
    images.append(render(parse("a blue square"), rng))
    result = SceneReward().score(samples_of(images), requests_of([scene] * 3), torch.zeros(3, dtype=torch.long))
    torch.testing.assert_close(result.scores["scene"], torch.tensor([1.0, 0.3, 0.0]))
    assert result.scores["scene_correct"].tolist() == [1.0, 0.0, 0.0]
    assert all(mask.all() for mask in result.valid.values())
    assert result.scores["scene"].dtype == torch.float32


def test_permuted_inputs_permute_scores(rendered):
    scenes, images = [scene for scene, _ in rendered[::7]], [image for _, image in rendered[3::7]]
    n = min(len(scenes), len(images))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    samples, requests = samples_of(images[:n]), requests_of(scenes[:n])
    group = torch.zeros(n, dtype=torch.long)
    plain = SceneReward().score(samples, requests, group)
    mixed = SceneReward().score([samples[i] for i in order], [requests[i] for i in order], group)
    for name in ("scene", "scene_correct"):
        assert torch.equal(plain.scores[name][order], mixed.scores[name])


def test_bad_samples_are_invalid_with_a_reason():
    scene = parse("a red circle")
    image = torch.from_numpy(render(scene, np.random.default_rng(10)))
    samples = [Sample({}, ok=False), Sample({"image": image.repeat(2, 2, 1)}), Sample({"image": image})]
    result = SceneReward().score(samples, requests_of([scene] * 3), torch.zeros(3, dtype=torch.long))
    assert result.valid["scene"].tolist() == result.valid["scene_correct"].tolist() == [False, False, True]
    assert "no image" in result.details[0]["reason"]
    assert "(64, 64, 3)" in result.details[1]["reason"]


def test_reward_weights_must_sum_to_one():
    with pytest.raises(ValueError, match="sum to 1"):
        SceneReward(correct_weight=0.7, found_weight=0.7)
