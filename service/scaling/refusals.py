"""What is refused: lengths above the maximum, and wishes whatever the lengths, with what is allowed instead. Chooses
nothing."""

from collections.abc import Iterable, Sequence

from model_patches.geometry import RopeGeometry
from service.errors import ContextLengthError, WishError
from service.scaling.ladder import itself_scaled
from service.scaling.options import RopePolicy
from service.scaling.wish import RopeWish


def check_length(prompt_tokens: int, max_tokens: int | None, max_length: int, why: str | None = None) -> None:
    """Refuse a request that does not fit the maximum length.

    Args:
        prompt_tokens: of its prompt.
        max_tokens: that it asks for; None for all that remains.
        max_length: tokens.
        why: in words, why there is no more, where that is no choice of the operator's.

    Raises:
        ContextLengthError: the message says how much too long it is.
    """
    reason = "" if why is None else f" ({why})"
    if prompt_tokens >= max_length:
        message = f"the prompt has {prompt_tokens} tokens; the maximum length is {max_length}, "
        raise ContextLengthError(f"{message}of which at least one must remain to generate{reason}", param="prompt")
    if max_tokens is not None and prompt_tokens + max_tokens > max_length:
        message = f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together "
        message += f"{prompt_tokens + max_tokens}, above the maximum length {max_length}{reason}"
        raise ContextLengthError(message, param="max_tokens")


def check_allowed(wish: RopeWish, options: RopePolicy) -> None:
    """Refuse a wish in fields that the operator keeps.

    Raises:
        WishError: the message says which fields are a request's choice.
    """
    allowed = options.requests_may_choose
    for name in wish.asked_for:
        if name not in allowed:
            message = f"{name} is not a request's choice on this server; allowed: {', '.join(allowed) or 'nothing'}"
            raise WishError(message, param=f"rope.{name}")


def check_wish(
    wish: RopeWish, options: RopePolicy, schemes: Sequence[str], ladder: Sequence[float], geometry: RopeGeometry
) -> None:
    """Refuse a wish that this server does not allow or have, or that contradicts itself.

    Args:
        wish: what a request asks for.
        options: the operator's.
        schemes: those that the model can run.
        ladder: the factors in use; the first is the native plan's.
        geometry: of the model.

    Raises:
        WishError: the message says what is allowed.
    """
    check_allowed(wish, options)
    why = f" ({itself_scaled(geometry)} and its own plan is all there is)" if geometry.is_scaled else ""
    if wish.scheme is not None and wish.scheme not in schemes:
        message = f"scheme {wish.scheme!r} is not available; allowed: {', '.join(schemes)}"
        raise WishError(message + why, param="rope.scheme")
    if wish.factor is not None and wish.factor not in ladder:
        message = f"factor {exact(wish.factor)} is not available; allowed: {listed(ladder)}"
        raise WishError(message + why, param="rope.factor")
    if wish.is_unscaled_for_ever:
        _check_unscaled(wish, ladder[0], geometry.scheme)


def _check_unscaled(wish: RopeWish, native_factor: float, native_scheme: str) -> None:
    """Refuse what goes against staying under the native plan."""
    cause = "mode native" if wish.mode == "native" else "scheme 'default'"
    if wish.factor not in (None, native_factor):
        message = f"{cause} goes only with factor {exact(native_factor)}, not with {exact(wish.factor)}"
        raise WishError(message, param="rope.factor")
    if wish.mode == "native" and wish.scheme not in (None, "default", native_scheme):
        message = f"mode native runs the model's own scheme {native_scheme!r}, not {wish.scheme!r}; "
        raise WishError(message + "ask for mode static or dynamic, or for no scheme", param="rope.scheme")
    if wish.growth not in (None, "stop"):
        raise WishError(f"{cause} goes only with growth stop, not with {wish.growth}", param="rope.growth")


def listed(factors: Iterable[float]) -> str:
    """Factors as a request may send them back."""
    return ", ".join(map(exact, factors))


def exact(factor: float) -> str:
    """A factor as a request may send it back: 2, 2.5, 2.3333333333333335."""
    return repr(float(factor)).removesuffix(".0")
