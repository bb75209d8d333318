-- SPDX-License-Identifier: Apache-2.0
-- Wireshark dissector of ATP packets (docs/protocol.md). tests/simulator checks the layout against proto/wire.toml.
-- The short name atp is that of AppleTalk in Wireshark.
-- Use: wireshark -X lua_script:atp.lua FILE, or copy it to the personal Lua plugins folder.

local atp = Proto("atp_aggregation", "ATP in-network aggregation")

local HEADER_BYTES = 16
local UDP_PORT = 10800

-- name, byte of the word, word mask, base, description
local LAYOUT = {
  {"jobId", 0, 0xff000000, base.DEC, "Job ID"},
  {"sequence", 0, 0x00ffffff, base.DEC, "Sequence"},
  {"bitmap0", 4, 0xffffffff, base.HEX, "Workers of the rack (bitmap0)"},
  {"bitmap1", 8, 0xffffffff, base.HEX, "Racks (bitmap1)"},
  {"fanInDegree0", 12, 0xf8000000, base.DEC, "Workers of the rack, 0 is 32"},
  {"fanInDegree1", 12, 0x07c00000, base.DEC, "Racks of the job, 0 is 32"},
  {"edgeSwitchIdentifier", 12, 0x00200000, base.DEC, "Level 0 is complete"},
  {"resend", 12, 0x00100000, base.DEC, "Resend"},
  {"collision", 12, 0x00080000, base.DEC, "Collision"},
  {"ecn", 12, 0x00040000, base.DEC, "Congestion was met"},
  {"isAck", 12, 0x00020000, base.DEC, "ACK"},
  {"rawFloat", 12, 0x00010000, base.DEC, "Raw values"},
  {"aggregatorIndex", 12, 0x0000ffff, base.DEC, "Aggregator"},
}

local fields, order = {}, {}
for _, f in ipairs(LAYOUT) do
  local field = ProtoField.uint32("atp_aggregation." .. f[1], f[5], f[4], nil, f[3])
  fields[f[1]] = field
  order[#order + 1] = field
end
local int_values = ProtoField.int32("atp_aggregation.value", "Value", base.DEC)
local raw_values = ProtoField.float("atp_aggregation.rawValue", "Raw value")
order[#order + 1] = int_values
order[#order + 1] = raw_values
atp.fields = order
atp.prefs.values = Pref.uint("Values to show", 8, "How many of a packet's values the tree lists")

local function get(word, mask)
  local v = bit.band(word, mask)
  while bit.band(mask, 1) == 0 do
    mask = bit.rshift(mask, 1)
    v = bit.rshift(v, 1)
  end
  -- The bit library's numbers are signed.
  return v % 4294967296
end

local function kind(ack, resend, raw, index, edge)
  if not raw then
    if ack then
      if resend then return "correction request" end
      return edge and "ACK to one worker" or "ACK"
    end
    return resend and "resend" or "gradient"
  end
  if not ack then return "raw gradient" end
  if index == 2 then return "notice" end
  if index == 3 then return "repeated ACK" end
  return "raw result"
end

function atp.dissector(buffer, pinfo, tree)
  if buffer:len() < HEADER_BYTES then return 0 end
  local value = {}
  local sub = tree:add(atp, buffer(0, buffer:len()))
  for _, f in ipairs(LAYOUT) do
    sub:add(fields[f[1]], buffer(f[2], 4))
    value[f[1]] = get(buffer(f[2], 4):uint(), f[3])
  end
  local raw = value.rawFloat == 1
  local name = kind(value.isAck == 1, value.resend == 1, raw, value.aggregatorIndex, value.edgeSwitchIdentifier == 1)
  local collision = ""
  if value.collision == 1 then
    collision = (value.resend == 1 or value.isAck == 1) and ", collision" or ", repeat"
  end
  pinfo.cols.protocol = "ATP"
  pinfo.cols.info = string.format(
    "%s, job %d, sequence %d, aggregator %d, bitmaps 0x%x 0x%x%s%s%s", name, value.jobId, value.sequence,
    value.aggregatorIndex, value.bitmap0, value.bitmap1, value.edgeSwitchIdentifier == 1 and ", edge" or "",
    collision, value.ecn == 1 and ", ecn" or "")
  sub:append_text(": " .. name)
  local count = math.floor((buffer:len() - HEADER_BYTES) / 4)
  local floats = raw and value.aggregatorIndex == 0
  for i = 0, math.min(count, atp.prefs.values) - 1 do
    sub:add(floats and raw_values or int_values, buffer(HEADER_BYTES + 4 * i, 4))
  end
  return buffer:len()
end

DissectorTable.get("udp.port"):add(UDP_PORT, atp)
