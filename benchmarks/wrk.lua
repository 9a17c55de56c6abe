-- Sends prepared requests; benchmarks/wrk.py writes the files and reads the last line.
--
-- A request is cut at its marks, and a number that never repeats goes there: as white space
-- (`space`) or as hexadecimal digits (`digits`), always 16 bytes, so that lengths stay.

local char, concat, floor = string.char, table.concat, math.floor
local pieces, order, at, number, filler = {}, {}, 0, 0, nil

local function quads(digit_of, base, width)
  local found = {}
  for n = 0, base ^ width - 1 do
    local digits, rest = {}, n
    for i = width, 1, -1 do
      digits[i] = digit_of(rest % base)
      rest = floor(rest / base)
    end
    found[n] = concat(digits)
  end
  return found
end

local function filler_of(kind)
  local spaces, hex = { [0] = " ", "\t", "\n", "\r" }, "0123456789abcdef"
  local base, quad
  if kind == "space" then
    base = 256
    quad = quads(function(d) return spaces[d] end, 4, 4)
  else
    base = 65536
    quad = quads(function(d) return hex:sub(d + 1, d + 1) end, 16, 4)
  end
  return function(n)
    local a = n % base
    n = floor(n / base)
    local b = n % base
    n = floor(n / base)
    return quad[floor(n / base) % base] .. quad[n % base] .. quad[b] .. quad[a]
  end
end

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

function init(args)
  local path, kind = args[1], args[2]
  number = tonumber(args[3])
  filler = filler_of(kind)
  local text, from = read(path .. ".requests"), 1
  for length in read(path .. ".lengths"):gmatch("%d+") do
    local cut, start = {}, from
    local stop = from + tonumber(length) - 1
    while true do
      local mark = text:find("\1", start, true)
      if not mark or mark > stop then break end
      cut[#cut + 1] = text:sub(start, mark - 1)
      start = mark + 1
    end
    cut[#cut + 1] = text:sub(start, stop)
    pieces[#pieces + 1] = cut
    from = stop + 1
  end
  for index in read(path .. ".order"):gmatch("%d+") do
    order[#order + 1] = tonumber(index) + 1
  end
end

function request()
  at = at % #order + 1
  local cut = pieces[order[at]]
  local n = #cut
  if n == 1 then return cut[1] end
  number = number + 1
  local unique = filler(number)
  if n == 2 then return cut[1] .. unique .. cut[2] end
  return cut[1] .. unique .. cut[2] .. unique .. cut[3]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,'
      .. '"refused":%d,"lost":%d,"timeouts":%d,"bad_status":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect, errors.read + errors.write, errors.timeout, errors.status))
end
