// What people type, as the search takes it. It knows no word of every sentence (its index leaves them out), and would
// take "is" for the beginning of "isolation"; a flag such as --kv begins with the sign that excludes a word; a quote in
// an error would require the words after it; and "3" is the beginning of each number with that digit.
const EVERYWHERE = new Set(`a about all am an and any are as at be been but by can could did do does else for from get gets got
had has have how i if in instead into is it its me my no nor not of on or our should so some than that the their them then
there these they this to too us vs was we were what when where which while who why will with would you your`.split(/\s+/))
const QUERY = 2

function searched(text) {
  const words = text.toLowerCase().split(/[\s\-,:;!?=[\]{}()<>"'`/|.+*~^&%$#@]+/).filter(Boolean)
  const telling = words.filter(word => !EVERYWHERE.has(word))
  return (telling.length ? telling : words).map(beginning).join(" ")
}

// A short word is itself; of another all words that begin with it are found, and with its singular.
function beginning(word) {
  if (word.length < 3 || /^\d+$/.test(word)) return `${word}^1`
  return word.length > 3 ? word.replace(/(?<![su])s$/, "") : word
}

const send = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...rest) {
  const asked = message.type === QUERY ? { ...message, data: searched(message.data) } : message
  send.call(this, asked, ...rest)
}
