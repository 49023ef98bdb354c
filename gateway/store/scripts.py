"""Redis runs each script in one go. A script takes the time in microseconds first; without one it is Redis's own.

The keys of one namespace are in one slot, so a script may also touch keys that it makes from a prefix and an id.
"""

from __future__ import annotations

from hashlib import sha1

SCRIPTS: dict[str, str] = {}
"""The scripts by their SHA-1, by which they are called."""


_LIBRARY = """
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end
local function keep(key, ttl_ms)
    if redis.call('PTTL', key) < tonumber(ttl_ms) then redis.call('PEXPIRE', key, ttl_ms) end
end
-- A record has a name, KIND:ID. The sizes of a tenant's records are in one hash, with their sum under ''.
local function forget(sizes, expiries, name)
    local size = redis.call('HGET', sizes, name)
    if size then
        redis.call('HINCRBY', sizes, '', -size)
        redis.call('HDEL', sizes, name)
    end
    redis.call('ZREM', expiries, name)
    if redis.call('ZCARD', expiries) == 0 then redis.call('UNLINK', sizes) end
end
local function note_size(sizes, expiries, name, size, ttl_ms)
    local before = tonumber(redis.call('HGET', sizes, name) or '') or 0
    redis.call('HSET', sizes, name, size)
    redis.call('HINCRBY', sizes, '', size - before)
    redis.call('ZADD', expiries, now + ttl_ms * 1000, name)
    keep(sizes, ttl_ms)
    keep(expiries, ttl_ms)
end
-- Removes what would expire first until the rest is small enough; where remove(name) returns false, it stops.
local function make_room(sizes, expiries, most, remove)
    local evicted = 0
    for _ = 1, 100 do
        local oldest = redis.call('ZRANGE', expiries, 0, 0, 'WITHSCORES')
        if tonumber(oldest[2]) > now then
            if tonumber(redis.call('HGET', sizes, '')) <= tonumber(most) or not remove(oldest[1]) then break end
            evicted = evicted + 1
        end
        forget(sizes, expiries, oldest[1])
    end
    return {tonumber(redis.call('HGET', sizes, '')), evicted}
end
local function ahead_of(key)
    return math.max(0, (tonumber(redis.call('GET', key) or '') or 0) - now)
end
local function save(key, ahead)
    if ahead <= 0 then return redis.call('UNLINK', key) end
    redis.call('SET', key, string.format('%.0f', now + ahead), 'PX', math.ceil(ahead / 1000) + 1000)
end
local function used_of(key)
    local counts = redis.call('HMGET', key, 'requests', 'tokens')
    return {tonumber(counts[1] or '') or 0, tonumber(counts[2] or '') or 0}
end
local function use(key, used, requests, tokens, ttl_ms)
    used[1], used[2] = used[1] + requests, math.max(0, used[2] + tokens)
    redis.call('HSET', key, 'requests', string.format('%.0f', used[1]), 'tokens', string.format('%.0f', used[2]))
    keep(key, ttl_ms)
end
"""


def _script(text: str) -> str:
    text = _LIBRARY + text
    sha = sha1(text.encode(), usedforsecurity=False).hexdigest()
    SCRIPTS[sha] = text
    return sha


PUT = _script("""
-- KEYS record, index (the record itself if it has none), sizes, expiries
-- ARGV now, value, ttl_ms, kind, id, what has to be there, beginning of record keys, the same with kind and tenant,
--      most ids, most bytes (empty if the record does not count), what a record takes beside its value
-- What has to be there is 'none', the SHA-1 of a value, or empty if it may be anything. The answer is what is there
-- instead, or the bytes of all that the tenant has and how many records had to go.
local name = ARGV[4] .. ':' .. ARGV[5]
if ARGV[6] ~= '' then
    local there = redis.call('GET', KEYS[1])
    if (there and redis.sha1hex(there) or 'none') ~= ARGV[6] then return there or 'none' end
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
if KEYS[2] ~= KEYS[1] then
    for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, 1)) do
        if redis.call('EXISTS', ARGV[8] .. id) == 0 then redis.call('ZREM', KEYS[2], id) end
    end
    local last = tonumber(redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2] or '') or 0
    redis.call('ZADD', KEYS[2], math.max(now, last + 1), ARGV[5])
    redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[9])
    keep(KEYS[2], ARGV[3])
end
if ARGV[10] == '' then return {0, 0} end
note_size(KEYS[3], KEYS[4], name, #ARGV[2] + ARGV[11], ARGV[3])
return make_room(KEYS[3], KEYS[4], ARGV[10], function(oldest)
    if oldest == name then return false end
    local kind, id = string.match(oldest, '^([^:]*):(.*)$')
    redis.call('UNLINK', ARGV[7] .. kind .. string.sub(ARGV[8], #ARGV[7] + #ARGV[4] + 1) .. id)
    return true
end)
""")

KEEP = _script("""
-- KEYS record, index, sizes, expiries  ARGV now, ttl_ms, name, GET or EXISTS
local answer = redis.call(ARGV[4], KEYS[1])
if answer and answer ~= 0 then
    keep(KEYS[1], ARGV[2])
    keep(KEYS[2], ARGV[2])
    if redis.call('ZADD', KEYS[4], 'XX', 'GT', 'CH', now + ARGV[2] * 1000, ARGV[3]) == 1 then
        keep(KEYS[3], ARGV[2])
        keep(KEYS[4], ARGV[2])
    end
end
return answer
""")

DELETE = _script("""
-- KEYS record, index, sizes, expiries  ARGV now, id, name
redis.call('ZREM', KEYS[2], ARGV[2])
forget(KEYS[3], KEYS[4], ARGV[3])
return redis.call('UNLINK', KEYS[1])
""")

LIST = _script("""
-- KEYS index  ARGV (now), most ids, prefix of records
local existing, start = {}, 0
local most = tonumber(ARGV[2])
while #existing < most do
    local ids = redis.call('ZREVRANGE', KEYS[1], start, start + 99)
    if #ids == 0 then break end
    for _, id in ipairs(ids) do
        if redis.call('EXISTS', ARGV[3] .. id) == 0 then
            redis.call('ZREM', KEYS[1], id)
        else
            start = start + 1
            if #existing < most then existing[#existing + 1] = id end
        end
    end
end
return existing
""")

WRITE_JOURNAL = _script("""
-- KEYS journal, tokens, unfinished, sizes, expiries
-- ARGV now, owner, header, offset, tokens, ttl_ms, end, stream, hash of the tenant, beginning of journal keys, of token
--      keys, most bytes of the tenant's journals, what one takes beside its content
-- Those that have ended make room for others; where they do not suffice, no new one is begun.
local before = redis.call('HMGET', KEYS[1], 'end', 'owner')
local offset = tonumber(ARGV[4])
if before[1] then return 'ended' end
if not before[2] and ARGV[3] == '' then return 'missing' end
if before[2] and before[2] ~= ARGV[2] then return 'foreign' end
if not before[2] then redis.call('UNLINK', KEYS[1], KEYS[2]) end
local count = math.floor(redis.call('STRLEN', KEYS[2]) / 4)
if offset > count then return 'gap' end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'header', ARGV[3], 'owner', ARGV[2], 'tenant', ARGV[9]) end
if #ARGV[5] > 0 then redis.call('SETRANGE', KEYS[2], offset * 4, ARGV[5]) end
redis.call('HSET', KEYS[1], 'count', math.max(count, offset + #ARGV[5] / 4))
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
if ARGV[7] == '' then
    redis.call('ZADD', KEYS[3], now + ARGV[6] * 1000, ARGV[8])
    keep(KEYS[3], ARGV[6])
else
    redis.call('HSET', KEYS[1], 'end', ARGV[7])
    redis.call('ZREM', KEYS[3], ARGV[8])
end
local size = redis.call('HSTRLEN', KEYS[1], 'header') + redis.call('STRLEN', KEYS[2]) + ARGV[13]
note_size(KEYS[4], KEYS[5], ARGV[8], size, ARGV[6])
local left = make_room(KEYS[4], KEYS[5], ARGV[12], function(oldest)
    if oldest == ARGV[8] or redis.call('ZSCORE', KEYS[3], oldest) then return false end
    redis.call('UNLINK', ARGV[10] .. oldest, ARGV[11] .. oldest)
    return true
end)
if before[2] or left[1] <= tonumber(ARGV[12]) then return 'written' end
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[8])
forget(KEYS[4], KEYS[5], ARGV[8])
return 'full'
""")

DELETE_JOURNAL = _script("""
-- KEYS journal, tokens, unfinished  ARGV now, stream, beginning of keys of sizes, of expiries
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if tenant then forget(ARGV[3] .. tenant, ARGV[4] .. tenant, ARGV[2]) end
redis.call('ZREM', KEYS[3], ARGV[2])
redis.call('UNLINK', KEYS[1], KEYS[2])
""")

READ_JOURNAL = _script("""
-- KEYS journal, tokens
local fields = redis.call('HMGET', KEYS[1], 'header', 'end', 'count')
return {fields[1], fields[2], fields[3], redis.call('GET', KEYS[2])}
""")

CLAIM = _script("""
-- KEYS unfinished, replicas, since  ARGV now, owner, owner up to its epoch, alive_us, prefix of journals, most
local alive_us = tonumber(ARGV[4])
local function lives(owner)
    local beat = tonumber(redis.call('ZSCORE', KEYS[2], owner) or '')
    return beat and beat > now - alive_us
end
if not lives(ARGV[2]) then return {} end
-- Soon after Redis lost its replicas, those that live may not have been heard of yet.
local since = tonumber(redis.call('GET', KEYS[3]) or '')
local too_early = not since or now - since < alive_us
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local claimed = {}
for _, stream in ipairs(redis.call('ZRANGE', KEYS[1], 0, ARGV[6] - 1)) do
    local owner = redis.call('HGET', ARGV[5] .. stream, 'owner')
    if not owner then
        redis.call('ZREM', KEYS[1], stream)
    else
        local same_name = string.sub(owner, 1, #ARGV[3]) == ARGV[3]
        if same_name or not (too_early or lives(owner)) then
            if owner ~= ARGV[2] then redis.call('HSET', ARGV[5] .. stream, 'owner', ARGV[2]) end
            claimed[#claimed + 1] = stream
        end
    end
end
return claimed
""")

BEAT = _script("""
-- KEYS replicas, since, resident  ARGV now, owner, owner up to its epoch, alive_us, first, ttl_ms of resident
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SET', KEYS[2], string.format('%.0f', now)) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[4])
local before = redis.call('ZSCORE', KEYS[1], ARGV[2])
for _, other in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    if other ~= ARGV[2] and string.sub(other, 1, #ARGV[3]) == ARGV[3] then
        if ARGV[5] == '1' then redis.call('ZREM', KEYS[1], other) else return {'replaced', ''} end
    end
end
redis.call('ZADD', KEYS[1], now, ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4] / 1000)
redis.call('PEXPIRE', KEYS[2], ARGV[4] / 1000)
redis.call('PEXPIRE', KEYS[3], ARGV[6])
return {before and 'known' or 'new', redis.call('GET', KEYS[2])}
""")

RESERVE = _script("""
-- KEYS requests, tokens, leases, windows...
-- ARGV now, cost of the request, of its tokens, most streams, lease (empty if it needs none), lease_us, tokens,
--      then each window's most requests, most tokens (empty if there is no bound) and ttl_ms
-- A cost is in microseconds, or empty if there is no bound, or 'never'. The answer has times and counts as they were
-- before, if it is refused, and as they are now, if it is not. With the time alone, nothing is reserved.
local ahead = {ahead_of(KEYS[1]), ahead_of(KEYS[2])}
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
local streams = redis.call('ZCARD', KEYS[3])
local used = {}
for i = 4, #KEYS do used[i] = used_of(KEYS[i]) end
local function standing(fits)
    local answer = {fits, streams, ahead[1], ahead[2]}
    for i = 4, #KEYS do
        answer[#answer + 1] = used[i][1]
        answer[#answer + 1] = used[i][2]
    end
    return answer
end
if #ARGV == 1 then return standing(1) end
if redis.call('ZSCORE', KEYS[3], ARGV[5]) then streams = streams - 1 end
local fits = ARGV[4] == '' or streams < tonumber(ARGV[4])
for i = 1, 2 do
    local cost = ARGV[1 + i]
    if cost == 'never' or (cost ~= '' and ahead[i] + cost > 60000000) then fits = false end
end
for i = 4, #KEYS do
    local most = 3 * i - 4
    for j, amount in ipairs({1, ARGV[7]}) do
        local limit = ARGV[most + j - 1]
        if limit ~= '' and used[i][j] + amount > tonumber(limit) then fits = false end
    end
end
if fits then
    for i = 4, #KEYS do use(KEYS[i], used[i], 1, ARGV[7], ARGV[3 * i - 2]) end
    for i = 1, 2 do
        if ARGV[1 + i] ~= '' then
            ahead[i] = ahead[i] + ARGV[1 + i]
            save(KEYS[i], ahead[i])
        end
    end
    if ARGV[5] ~= '' then
        redis.call('ZADD', KEYS[3], now + ARGV[6], ARGV[5])
        redis.call('PEXPIRE', KEYS[3], ARGV[6] / 1000)
    end
end
return standing(fits and 1 or 0)
""")

SETTLE = _script("""
-- KEYS tokens, windows...  ARGV now, cost (empty if there is no bound), requests, tokens, then each window's ttl_ms
if ARGV[2] ~= '' then save(KEYS[1], math.min(ahead_of(KEYS[1]) + ARGV[2], 24 * 3600 * 1000000)) end
for i = 2, #KEYS do use(KEYS[i], used_of(KEYS[i]), ARGV[3], ARGV[4], ARGV[3 + i]) end
""")

RENEW = _script("""
-- KEYS leases  ARGV now, lease_us, lease...
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2] / 1000)
""")

WRITE_PREFIXES = _script("""
-- KEYS hot, resident  ARGV (now), prefix of prefixes, most, ttl_ms, ttl_ms of resident,
--                          then each one's hash, last use, hotness and value, which is empty if it is gone
for i = 6, #ARGV, 4 do
    if ARGV[i + 3] == '' then
        redis.call('ZREM', KEYS[2], ARGV[i])
    else
        redis.call('SET', ARGV[2] .. ARGV[i], ARGV[i + 3], 'PX', ARGV[4])
        redis.call('ZADD', KEYS[1], ARGV[i + 2], ARGV[i])
        redis.call('ZADD', KEYS[2], ARGV[i + 1], ARGV[i])
    end
end
local excess = redis.call('ZCARD', KEYS[1]) - ARGV[3]
if excess > 0 then
    local popped = redis.call('ZPOPMIN', KEYS[1], excess)
    for i = 1, #popped, 2 do redis.call('UNLINK', ARGV[2] .. popped[i]) end
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
""")

LOCATE = _script("""
-- KEYS replicas  ARGV now, alive_us, prefix of residents, hash...
local answer = {}
for _, owner in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now - ARGV[2]), '+inf')) do
    local count = 0
    for i = 4, #ARGV do
        if not redis.call('ZSCORE', ARGV[3] .. owner, ARGV[i]) then break end
        count = count + 1
    end
    answer[#answer + 1] = owner
    answer[#answer + 1] = count
end
return answer
""")
