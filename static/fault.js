/** What goes wrong between the page and the server. */

/**
 * Why a request gave no (whole) answer.
 *
 * @typedef {"refused"|"failed"|"lost"|"unreachable"|"gone"} Kind
 *   refused: the server answered with an error status
 *   failed: the server reported an error inside the stream
 *   lost: the stream ended before the server said that it was done
 *   unreachable: no connection
 *   gone: the server no longer has the rest
 */
export class ApiError extends Error {
  /** @param {{kind: Kind, message: string, status?: number, code?: ?string, retryAfterMs?: ?number}} fault */
  constructor({ kind, message, status = 0, code = null, retryAfterMs = null }) {
    super(message);
    this.kind = kind;
    this.status = status;
    this.code = code;
    this.retryAfterMs = retryAfterMs;
  }
}

/** The message of whatever was thrown. @param {unknown} fault */
export function messageOf(fault) {
  return fault instanceof Error ? fault.message : String(fault);
}
