"""ApiVersions: which APIs are served, in which versions, to a client that knows nothing yet.

* Its answer has the response header of version 0 in every version. A version that is not known is
  answered in version 0, with the error and the range of ApiVersions itself, from which a client
  finds one that both know (KIP-511).
* `transaction.version=2`: clients may speak transactions by KIP-890; `group.version=1`: groups by
  KIP-848; `share.version=1`: share groups (KIP-932).
"""

from __future__ import annotations

import re
from typing import Final

from tierlog.api.kafka.calls import Call, Calls, Handler, served_apis
from tierlog.api.kafka.error_codes import Code
from tierlog.record_format.kafka_messages.apis import API_VERSIONS, APIS, Api
from tierlog.record_format.kafka_messages.codec import UnsupportedVersion
from tierlog.record_format.kafka_messages.messages import ApiVersionsRequest, ApiVersionsResponse

_NAME: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")  # KIP-511
_FIRST_WITH_NAME: Final = 3
_FIRST_WITH_LEVEL_0: Final = 4  # of a feature: clients of version 3 fail on it (KAFKA-17011)
_FEATURES: Final = {
    "group.version": 1,
    "share.version": 1,
    "transaction.version": 2,
}  # finalized, at their highest level


def api_versions(calls: Calls) -> Handler:
    """The handler, for this table of calls."""

    def handle(call: Call, request: ApiVersionsRequest) -> ApiVersionsResponse:
        name, version = request.client_software_name, request.client_software_version
        if call.version >= _FIRST_WITH_NAME:
            if not (_NAME.fullmatch(name) and _NAME.fullmatch(version)):
                return ApiVersionsResponse(error_code=Code.INVALID_REQUEST)
            call.session.software = f"{name} {version}"
        return ApiVersionsResponse(
            api_keys=[_range(api) for api in served_apis(calls)],
            supported_features=[
                ApiVersionsResponse.SupportedFeatureKey(name, 0, level)
                for name, level in _FEATURES.items()
                if call.version >= _FIRST_WITH_LEVEL_0
            ],
            finalized_features_epoch=0,
            finalized_features=[
                ApiVersionsResponse.FinalizedFeatureKey(name, level, level)
                for name, level in _FEATURES.items()
            ],
        )

    return handle


def unsupported_version(error: UnsupportedVersion, calls: Calls) -> ApiVersionsResponse | None:
    """The answer to ApiVersions in a version that is not served; None for every other API."""
    if error.api.key != API_VERSIONS:
        return None
    ranges = [_range(APIS[API_VERSIONS])] if error.api.name in calls else []
    return ApiVersionsResponse(error_code=Code.UNSUPPORTED_VERSION, api_keys=ranges)


def _range(api: Api) -> ApiVersionsResponse.ApiVersion:
    return ApiVersionsResponse.ApiVersion(
        api_key=api.key, min_version=api.advertised_min_version, max_version=api.max_version
    )
